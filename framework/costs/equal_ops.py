"""Finds equal ops of a graph: TensorFlow computes them once, and their outputs are one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.costs.op_kinds import SAME_MEMORY

Same = Mapping[str, tf.Tensor]
"""{name of a tensor: the first tensor of the graph in the same memory}."""


def same_memory(graph: Any) -> Same:
    """Returns the tensors of a graph by the names of all that share their memory."""
    found: dict[str, tf.Tensor] = {}
    first: dict[Any, tf.Operation] = {}
    for op in graph.get_operations():
        given = [found.get(tensor.name, tensor) for tensor in op.inputs]
        if op.type in SAME_MEMORY:
            own = given[: len(op.outputs)]
        else:
            own = first.setdefault(kind(op, given), op).outputs
        found.update({tensor.name: one for tensor, one in zip(op.outputs, own, strict=True)})
    return found


def kind(op: tf.Operation, given: Sequence[tf.Tensor]) -> Any:
    """Returns a key that ops share which compute the same of the same inputs."""
    if op.op_def.is_stateful or op.control_inputs or op.type == "Placeholder":
        return op.name
    node = op.node_def
    attributes = (
        (name, value.SerializeToString())
        for name, value in node.attr.items()
        if not name.startswith("_")
    )
    return op.type, tuple(tensor.name for tensor in given), tuple(sorted(attributes))
