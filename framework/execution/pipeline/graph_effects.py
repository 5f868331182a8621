"""Ops of a traced graph that do more than to compute their outputs from their inputs.

An effect (a message, a check) has to happen in the forward pass, once, even if nothing depends on
it. Random numbers of TensorFlow's own are other ones each time that they are computed: what is
computed again in a backward pass would not be what the forward pass has seen.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_READS = frozenset({"ReadVariableOp", "VarHandleOp"})


def effects(graph: Any) -> list[tf.Operation]:
    """Returns the ops of a graph that have to run whether or not something depends on them."""
    return [op for op in graph.get_operations() if op.op_def.is_stateful and op.type not in _READS]


def random_ops(graph: Any) -> list[str]:
    """Returns the types of the ops that draw other numbers each time, inside of others too."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    return sorted({node.op for some in nodes for node in some if _is_random(node)})


def _is_random(node: Any) -> bool:
    if node.op.startswith("Stateful"):
        return node.op != "StatefulPartitionedCall"
    has_state = "seed2" in node.attr and not node.op.startswith("Stateless")
    return has_state or node.op.startswith("Rng")
