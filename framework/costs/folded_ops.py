"""Finds the constants of a graph, and ops that read constants only.

TensorFlow computes such an op when it optimizes the graph, for example `tf.zeros`, and replaces it
by its result, which stays in memory. A large tensor that is made of smaller ones and is no repeated
value, such as a long `tf.range`, is computed in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tekso.framework.costs import equal_ops, graph_work, tensor_reads
from tekso.framework.costs.equal_ops import Merged

_MOST_BYTES = 10 << 20  # TensorFlow folds no op that makes a larger tensor of smaller ones
_REPEATED = frozenset({"Const", "Fill", "ZerosLike", "OnesLike"})


class Kept(NamedTuple):
    """The ops of a graph that run in every step.

    Attributes:
      ops: these ops, without those that TensorFlow merges with one of them.
      merged: the latter.
      constants: bytes of each tensor that is computed once and that the ops read.
    """

    ops: Sequence[Any]
    merged: Merged
    constants: Sequence[float]


def without_constants(graph: Any, ops: Sequence[Any], outputs: Sequence[Any]) -> Kept:
    """Returns the ops that run in every step.

    Args:
      graph: the graph.
      ops: ops of it that its outputs need.
      outputs: tensors that something reads after the graph.
    """
    merged = equal_ops.merged(graph, ops)
    ops = [op for op in ops if op.name not in merged.ops]
    constant = folded(ops, merged)
    names = {op.name for op in constant.values()}
    ops = [op for op in ops if op.name not in names]
    found, _ = tensor_reads.reads(ops, outputs, merged)
    read = constant.keys() & {name for names in found.values() for name in names}
    computed = [graph.get_tensor_by_name(n) for n in sorted(read) if constant[n].type != "Const"]
    return Kept(ops, merged, [graph_work.size_bytes(t) for t in computed])


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
