"""Finds the constants of a graph, and ops that read constants only.

TensorFlow computes such an op when it optimizes the graph, for example that of `tf.zeros`, and
replaces it by its result, which stays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tekso.framework.costs import graph_work
from tekso.framework.costs.equal_ops import Merged


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
    return op.type != "Placeholder" and all(t.dtype.size for t in op.outputs)
