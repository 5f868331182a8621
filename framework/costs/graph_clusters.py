"""The loops of an elementwise cluster that XLA compiles for a CPU: what they read and write.

    y = x * x                       loop 1: reads x, writes y
    s = sum(y, -1)                  loop 2: reads y
    z = exp(x) / s                  loop 3: reads x and s, writes z

A loop ends at an output of the cluster, at a sum and at what it sums, at a transposition, and at a
function such as an exponential whose result several loops need, or that a loop would compute again
for every element of a larger tensor. All other ops become part of each loop that needs them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tekso.framework.costs import graph_work, op_kinds

_EXPENSIVE = op_kinds.FUNCTIONS | {"RealDiv", "DivNoNan"}
_VALUES = frozenset({"Const", "Fill", "ZerosLike", "OnesLike", "Range", "Shape", "BroadcastTo"})
_ENDS = op_kinds.REORDERINGS | {"ArgMax"}
_SUMS = op_kinds.SUMS | {"ArgMax", "Cumsum"}


class ClusterLoop(NamedTuple):
    """A loop of a cluster.

    Attributes:
      op: the op whose result it writes.
      bytes: bytes that it reads and writes.
      elements: elements of simple ops that it computes.
      functions: elements of exponentials and similar functions.
      sums: elements that it adds.
    """

    op: Any
    bytes: float
    elements: float
    functions: float
    sums: float


class CompiledCluster:
    """The loops of a cluster.

    Args:
      graph: graph of its function.
      ops: the ops on which its outputs depend, in the order of the graph.
    """

    def __init__(self, graph: Any, ops: list[Any]) -> None:
        self._graph = graph
        self._ops = ops
        self._outputs = {self._root(t).op.name for t in getattr(graph, "outputs", None) or []}
        self._written = self._find_written()
        self.loops = [self._loop(op) for op in ops if op.name in self._written]

    def _root(self, tensor: Any) -> Any:
        """Returns the tensor of which a tensor is another name."""
        while tensor.op.type in op_kinds.SAME_MEMORY and len(tensor.op.inputs):
            tensor = tensor.op.inputs[0]
        return tensor

    def _operands(self, op: Any) -> list[Any]:
        return [self._root(t) for t in op.inputs]

    def _find_written(self) -> set[str]:
        """Returns the names of the ops whose results are written to memory."""
        needed_by: dict[str, set[str]] = {}  # op: the loops that need it
        largest: dict[str, int] = {}  # op: elements of the largest op that reads it
        written: set[str] = set()
        for op in reversed(self._ops):
            if op.type in op_kinds.SAME_MEMORY or op.type in _VALUES or op.type == "Placeholder":
                continue
            loops, size = needed_by.get(op.name, set()), _size(op)
            is_computed_again = op.type in _EXPENSIVE and (
                len(loops) > 1 or largest.get(op.name, 0) > size
            )
            reads_memory = op.type in _SUMS or self._is_whole(op)
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

    def _is_whole(self, op: Any) -> bool:
        """Returns whether an op has graphs of its own, or is a product."""
        return bool(graph_work.inside(self._graph, op)[1]) or op.type in op_kinds.PRODUCTS

    def _loop(self, op: Any) -> ClusterLoop:
        read, fused = self._read_by(op)
        functions = math.fsum(_size(o) for o in fused if o.type in op_kinds.FUNCTIONS)
        sums = math.fsum(_given(o) for o in fused if o.type in _SUMS)
        simple = [o for o in fused if o.type not in op_kinds.FUNCTIONS | _SUMS | _ENDS]
        moved = math.fsum(map(_bytes, read)) + math.fsum(map(_bytes, op.outputs))
        elements = math.fsum(0 if self._is_whole(o) else _size(o) for o in simple)
        return ClusterLoop(op, moved, elements, functions, sums)

    def _read_by(self, op: Any) -> tuple[list[Any], list[Any]]:
        """Returns the tensors that the loop of an op reads, and the ops that are part of it."""
        read: dict[str, Any] = {}
        fused, open_ops, seen = [], [op], {op.name}
        while open_ops:
            one = open_ops.pop()
            fused.append(one)
            for tensor in self._operands(one):
                before = tensor.op
                if before.type == "Placeholder" or before.name in self._written:
                    read[tensor.name] = tensor
                elif before.type not in _VALUES and before.name not in seen:
                    seen.add(before.name)
                    open_ops.append(before)
        return list(read.values()), fused

    def peak_bytes(self) -> float:
        """Returns the largest number of bytes that the results of loops hold at once.

        A result is freed after the last loop that reads it; outputs of the cluster stay.
        """
        last: dict[str, int] = {}
        for number, loop in enumerate(self.loops):
            for tensor in self._read_by(loop.op)[0]:
                last[tensor.op.name] = number
        held = peak = 0.0
        sizes = {loop.op.name: math.fsum(map(_bytes, loop.op.outputs)) for loop in self.loops}
        for number, loop in enumerate(self.loops):
            held += sizes[loop.op.name]
            peak = max(peak, held)
            done = [n for n, at in last.items() if at == number and n not in self._outputs]
            held -= math.fsum(sizes.get(name, 0.0) for name in done)
        return peak


def _size(op: Any) -> int:
    return max((graph_work.size(t) for t in op.outputs), default=0)


def _given(op: Any) -> int:
    return graph_work.size(op.inputs[0])


def _bytes(tensor: Any) -> float:
    return float(graph_work.size(tensor) * (tensor.dtype.size or 0))
