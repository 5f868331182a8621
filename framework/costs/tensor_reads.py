"""Finds the tensors that the ops of a graph read, and the values that its loops compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tekso.framework.costs import graph_work, op_kinds
from tekso.framework.costs.equal_ops import Merged
from tekso.framework.costs.graph_walks import needed_values


def reads(
    ops: Sequence[Any], outputs: Sequence[Any], merged: Merged
) -> tuple[dict[str, list[str]], dict[str, set[int]]]:
    """Returns {op: tensors that it reads} and {loop: numbers of the values that it computes}.

    TensorFlow divides an IdentityN, so it does not hold a tensor whose copy nothing reads. It
    divides loops too: it does not compute a value that neither the graph nor another value needs.

    Args:
      ops: the ops that run, in the order of the graph.
      outputs: tensors of the graph that something reads after it.
      merged: ops that TensorFlow merges with an earlier one.
    """
    found: dict[str, list[str]] = {}
    live: dict[str, set[int]] = {}
    wanted = set(map(merged.name, outputs))
    for op in reversed(ops):
        numbers: Iterable[int] = range(len(op.inputs))
        read = {n for n, tensor in enumerate(op.outputs) if tensor.name in wanted}
        if op.type == "IdentityN":
            numbers = sorted(read)
        elif op.type in op_kinds.LOOPS and graph_work.inside(op)[1]:
            live[op.name] = needed_values(op, read)
            numbers = sorted(live[op.name])
        found[op.name] = [merged.name(op.inputs[number]) for number in numbers]
        wanted.update(found[op.name])
    return found, live
