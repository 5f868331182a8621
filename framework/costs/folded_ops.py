"""Finds the constants of a graph, and ops that read constants only.

TensorFlow computes such an op when it optimizes the graph, for example `tf.zeros`, and replaces it
by its result, which stays in memory. A large tensor that is made of smaller ones and is no repeated
value, such as a long `tf.range`, is computed in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tekso.framework.costs import graph_work
from tekso.framework.costs.equal_ops import Merged

_MOST_BYTES = 10 << 20  # TensorFlow folds no op that makes a larger tensor of smaller ones
_REPEATED = frozenset({"Const", "Fill", "ZerosLike", "OnesLike"})


def folded(ops: Sequence[Any], merged: Merged) -> dict[str, Any]:
    """Returns {tensor: its op} of constants and of ops without any input but constants.

    Args:
      ops: the ops of a graph that run.
      merged: those that TensorFlow merges with an earlier one.
    """
    constant: dict[str, Any] = {}
    for op in ops:
        if constant.keys() >= set(map(merged.name, op.inputs)) and _may_be_folded(op):
            constant |= {t.name: op for t in op.outputs}
    return constant


def _may_be_folded(op: Any) -> bool:
    if op.op_def.is_stateful or op.control_inputs or graph_work.inside(op)[1]:
        return False
    if op.type == "Placeholder" or not all(t.dtype.size for t in op.outputs):
        return False
    made, given = _bytes(op.outputs), _bytes(op.inputs)
    return op.type in _REPEATED or made <= max(given, _MOST_BYTES)


def _bytes(tensors: Sequence[Any]) -> float:
    return max(map(graph_work.size_bytes, tensors), default=0.0)
