"""The loops of an elementwise cluster that XLA compiles for a CPU: what they read and write.

    y = x * x                       loop 1: reads x, writes y
    s = sum(y, -1)                  loop 2: reads y
    z = exp(x) / s                  loop 3: reads x and s, writes z

A loop ends at an output of the cluster, at a sum and at what it sums, at a transposition, and at a
function such as an exponential whose result several loops need, or that a loop would compute again
for every element of a larger tensor. All other ops become part of each loop that needs them.

A loop over time is compiled too. An iteration that reads a row of a tensor reads only this row, and
one that writes a row writes it in place. Tensors that no iteration changes are not copied.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.costs import graph_walks, graph_work, op_kinds
from tekso.framework.costs.tensor_reuse import Move

_EXPENSIVE = op_kinds.FUNCTIONS | {"RealDiv", "DivNoNan"}
_VALUES = frozenset({"Const", "Fill", "ZerosLike", "OnesLike", "Range", "Shape"})
"""Ops that read no elements; a loop writes their results only if they are outputs."""
_REPEATS = frozenset({"BroadcastTo"})
"""The same, but they read elements: a loop reads these instead of the result."""
_IN_PLACE = frozenset({"TensorScatterUpdate", "TensorListSetItem"})
_ENDS = op_kinds.REORDERINGS | {"ArgMax"}
_SUMS = op_kinds.SUMS | {"ArgMax", "Cumsum"}


class ClusterLoop(NamedTuple):
    """A loop of a cluster.

    Attributes:
      op: the op whose result it writes.
      move: the tensors of the cluster that it reads and writes, and their bytes.
      elements: elements of simple ops that it computes.
      functions: {op: elements} of exponentials and similar functions.
      sums: elements that it adds, of rows.
      column_sums: the same where the sums of neighbours are neighbours, as of the rows of a bias.
    """

    op: Any
    move: Move
    elements: float
    functions: Mapping[str, float]
    sums: float
    column_sums: float


class CompiledCluster:
    """The loops of a cluster.

    Args:
      graph: graph of its function.
    """

    def __init__(self, graph: Any) -> None:
        self._ops = graph_walks.needed(graph)
        self._outputs = {graph_work.root(t).op.name for t in getattr(graph, "outputs", None) or []}
        self._written = self._find_written()
        self.loops = [self._loop(op) for op in self._ops if op.name in self._written]

    def _operands(self, op: Any) -> list[Any]:
        return [] if op.type in _VALUES else [_source(t) for t in op.inputs]

    def _find_written(self) -> set[str]:
        """Returns the names of the ops whose results are written to memory."""
        needed_by: dict[str, set[str]] = {}  # op: the loops that need it
        largest: dict[str, int] = {}  # op: elements of the largest op that reads it
        written: set[str] = set()
        for op in reversed(self._ops):
            if graph_work.shared_inputs(op) or op.type == "Placeholder":
                continue
            if op.type in _VALUES | _REPEATS and op.name not in self._outputs:
                continue
            loops, size = needed_by.get(op.name, set()), _elements(op)
            is_computed_again = op.type in _EXPENSIVE and (
                len(loops) > 1 or largest.get(op.name, 0) > size
            )
            reads_memory = op.type in _SUMS or _is_whole(op)
            is_end = op.type in _ENDS or reads_memory
            if op.name in self._outputs or is_end or is_computed_again or op.name in written:
                written.add(op.name)
                loops, reach = {op.name}, size
            else:
                reach = max(size, largest.get(op.name, 0))
            for tensor in self._operands(op):
                before = tensor.op
                needed_by.setdefault(before.name, set()).update(loops)
                largest[before.name] = max(reach, largest.get(before.name, 0))
                if reads_memory and before.type not in _VALUES and before.type != "Placeholder":
                    written.add(before.name)
        return written

    def _loop(self, op: Any) -> ClusterLoop:
        read, fused = self._read_by(op)
        functions: dict[str, float] = {}
        for one in fused:
            if one.type in op_kinds.FUNCTIONS:
                functions[one.type] = functions.get(one.type, 0.0) + _elements(one)
        columns, rows = (
            math.fsum(_given(o) for o in fused if o.type in _SUMS and _is_of_columns(o) == of)
            for of in (True, False)
        )
        none = op_kinds.FUNCTIONS | _SUMS | _ENDS | {"TensorListStack"}  # a list is its stack
        simple = [o for o in fused if o.type not in none]
        reads = [(name, size) for name, (_, size) in read.items()]
        elements = math.fsum(0 if _is_whole(o) else _elements(o) for o in simple)
        return ClusterLoop(op, Move(reads, self._writes(op)), elements, functions, rows, columns)

    def _read_by(self, op: Any) -> tuple[dict[str, tuple[Any, float]], list[Any]]:
        """Returns {name: (tensor, bytes)} that the loop of an op reads, and the ops within it."""
        read: dict[str, tuple[Any, float]] = {}
        fused, open_ops, seen = [], [op], {op.name}
        while open_ops:
            one = open_ops.pop()
            fused.append(one)
            for number, tensor in enumerate(self._operands(one)):
                before = tensor.op
                if before.type == "Placeholder" or before.name in self._written:
                    size = graph_work.size_bytes(tensor)
                    if one.type in op_kinds.SLICES:
                        size = min(size, math.fsum(map(graph_work.size_bytes, one.outputs)))
                    elif one.type in _IN_PLACE and number == 0:
                        size = 0.0
                    read[tensor.name] = tensor, max(size, read.get(tensor.name, (None, 0.0))[1])
                elif before.type not in _VALUES and before.name not in seen:
                    seen.add(before.name)
                    open_ops.append(before)
        return read, fused

    def _writes(self, op: Any) -> list[tuple[str, float]]:
        """Returns [(tensor, bytes)] that the loop of an op writes."""
        sizes = [graph_work.size_bytes(op.inputs[2])] if op.type in _IN_PLACE else _new_bytes(op)
        return [(t.name, size) for t, size in zip(op.outputs, sizes, strict=True)]

    def peak_bytes(self) -> float:
        """Returns the largest number of bytes that the results of loops hold at once.

        A result is freed after the last loop that reads it; outputs of the cluster stay. The loops
        run in breadth-first order, as XLA schedules them so that they could run side by side: first
        all that read only inputs of the cluster, then those that wait only for them, and so on.
        """
        sizes = {loop.op.name: math.fsum(_new_bytes(loop.op)) for loop in self.loops}
        reads = {
            loop.op.name: {t.op.name for t, _ in self._read_by(loop.op)[0].values()} & sizes.keys()
            for loop in self.loops
        }
        readers = collections.Counter(name for names in reads.values() for name in names)
        readers.update(self._outputs)
        followers: dict[str, list[str]] = {}
        for name, names in reads.items():
            for before in names:
                followers.setdefault(before, []).append(name)
        waits = {name: len(names) for name, names in reads.items()}
        ready = collections.deque(name for name, count in waits.items() if not count)
        held = peak = 0.0
        while ready:
            name = ready.popleft()
            held += sizes[name]
            peak = max(peak, held)
            for before in reads[name]:
                readers[before] -= 1
                held -= 0.0 if readers[before] else sizes[before]
            held -= 0.0 if readers[name] else sizes[name]
            for after in followers.get(name, []):
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
        return peak


def _is_whole(op: Any) -> bool:
    """Returns whether an op has graphs of its own, or is a product."""
    return bool(graph_work.inside(op)[1]) or op.type in op_kinds.PRODUCTS


def _new_bytes(op: Any) -> list[float]:
    """Returns the bytes of each output of an op; 0 if it is in the memory of an input."""
    if op.type in _IN_PLACE:
        return [0.0]
    sizes = [graph_work.size_bytes(t) for t in op.outputs]
    if op.type not in op_kinds.LOOPS:
        return sizes
    body = graph_work.inside(op)[1][0]
    given = [t.name for t in body.inputs]
    return [
        0.0 if graph_work.root(after).name == before else size
        for before, after, size in zip(given, body.outputs, sizes, strict=True)
    ]


def _source(tensor: Any) -> Any:
    """Returns the tensor that has the elements of a tensor."""
    found = graph_work.root(tensor)
    return _source(found.op.inputs[0]) if found.op.type in _REPEATS else found


def _elements(op: Any) -> int:
    """Returns the number of elements that an op computes."""
    made = op.inputs[2:] if op.type in _IN_PLACE else op.outputs
    return max((graph_work.size(t) for t in made), default=0)


def _is_of_columns(op: Any) -> bool:
    """Returns whether a sum keeps the last dim."""
    axes = tf.get_static_value(op.inputs[1]) if op.type in op_kinds.SUMS else None
    rank = op.inputs[0].shape.rank
    return axes is not None and bool(rank) and rank - 1 not in np.ravel(axes) % rank


def _given(op: Any) -> int:
    return graph_work.size(op.inputs[0])
