"""Finds equal ops of a graph: TensorFlow computes them once, and their outputs are one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import graph_walks, graph_work

Same = Mapping[str, tf.Tensor]
"""{name of a tensor: the first tensor of the graph in the same memory}."""


def same_memory(graph: Any) -> Same:
    """Returns the tensors of a graph by the names of all that share their memory."""
    return _found(graph.get_operations())[0]


class Merged(NamedTuple):
    """The ops of a graph that TensorFlow merges with an earlier one.

    Attributes:
      ops: {name of an op: the earlier op that is equal}.
    """

    ops: Mapping[str, tf.Operation]

    def op_name(self, op: tf.Operation) -> str:
        """Returns the name of the op that runs for an op."""
        return str(self.ops.get(op.name, op).name)

    def name(self, tensor: tf.Tensor) -> str:
        """Returns the name of the tensor that is computed for a tensor."""
        op = self.ops.get(tensor.op.name)
        return str(tensor.name if op is None else op.outputs[tensor.value_index].name)


def merged(graph: Any, ops: Sequence[Any]) -> Merged:
    """Returns the ops of a graph that are equal to an earlier one, of those that run.

    TensorFlow removes all others first.

    Args:
      graph: the graph.
      ops: ops that run, besides those that the outputs of the graph need.
    """
    names = {op.name for op in (*graph_walks.needed(graph), *ops)}
    return Merged(_found([op for op in graph.get_operations() if op.name in names])[1])


def _found(graph_ops: Sequence[Any]) -> tuple[Same, Mapping[str, tf.Operation]]:
    """Returns {tensor: first one in the same memory} and {op: earlier one that is equal}.

    What reads a tensor behind a control input, such as the sigmoid that the gradient of
    `tf.nn.silu` computes again, is not equal to what reads the tensor itself.
    """
    tensors: dict[str, tf.Tensor] = {}  # the first one in the same memory
    equal: dict[str, tf.Tensor] = {}  # the first one of the same value that waits for no other op
    first: dict[Any, tf.Operation] = {}
    ops: dict[str, tf.Operation] = {}
    for op in graph_ops:
        given = [equal.get(tensor.name, tensor) for tensor in op.inputs]
        if shared := graph_work.shared_inputs(op):
            inputs = [op.inputs[number] for number in shared]
            own = [tensors.get(tensor.name, tensor) for tensor in inputs]
            same = op.outputs if op.control_inputs else [given[number] for number in shared]
        else:
            earlier = first.setdefault(kind(op, given), op)
            own = same = earlier.outputs
            if earlier is not op:
                ops[op.name] = earlier
        names = [tensor.name for tensor in op.outputs]
        tensors.update(zip(names, own, strict=True))
        equal.update(zip(names, same, strict=True))
    return tensors, ops


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
