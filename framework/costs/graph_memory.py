"""Simulates the memory of a traced graph: the peak bytes of its tensors on one device.

Ops run in the order of the graph. A tensor is allocated by its op and freed after the last op that
reads it. An elementwise op writes its output over an input that nothing else reads. The inputs and
outputs of the graph are counted by the caller. A loop keeps what its iterations append to lists.
"""

from __future__ import annotations

from typing import Any

from tekso.framework.costs import graph_work
from tekso.framework.costs.graph_time import is_cluster, needed

_ALIASES = frozenset(
    {"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient",
     "Placeholder", "Const", "ReadVariableOp"}
)  # fmt: skip
_APPEND = "TensorListPushBack"
_SET = "TensorListSetItem"


def peak_bytes(graph: Any) -> float:
    """Returns the largest number of bytes that the ops of a graph hold at once."""
    ops = needed(graph)
    root: dict[str, str] = {}  # tensor: the tensor whose memory it has
    readers: dict[str, int] = {}
    sizes: dict[str, float] = {}
    outputs = getattr(graph, "outputs", None) or []
    for op in ops:
        for number, tensor in enumerate(op.outputs):
            given = op.inputs[min(number, len(op.inputs) - 1)].name if len(op.inputs) else None
            is_alias = op.type in _ALIASES
            root[tensor.name] = root[given] if is_alias and given in root else tensor.name
            held = 0.0 if is_alias else float(graph_work.size(tensor) * (tensor.dtype.size or 0))
            sizes.setdefault(root[tensor.name], held)
    for tensor in [*(t for op in ops for t in op.inputs), *outputs]:
        name = root.get(tensor.name)
        if name is not None:
            readers[name] = readers.get(name, 0) + 1
    held = peak = 0.0
    for op in ops:
        own = [root[t.name] for t in op.outputs if root.get(t.name) == t.name]
        new = sum(sizes[name] for name in own)
        reused = _reused(op, root, readers, sizes, new)
        inside = _inside_bytes(graph, op, new)
        peak = max(peak, held + new - reused + inside)
        held += new + _appended(op)
        for tensor in op.inputs:
            name = root.get(tensor.name)
            if name is None:
                continue
            readers[name] -= 1
            if not readers[name]:
                held -= sizes[name]
        for name in own:
            if not readers.get(name):
                held -= sizes[name]
        peak = max(peak, held)
    return peak


def _reused(op: Any, root: Any, readers: Any, sizes: Any, new: float) -> float:
    """Returns the bytes of an input that the op overwrites with its output."""
    if len(op.outputs) != 1 or op.type in ("MatMul", "BatchMatMulV2", "Einsum", "Transpose"):
        return 0.0
    for tensor in op.inputs:
        name = root.get(tensor.name)
        if name is not None and readers.get(name) == 1 and sizes[name] == new:
            return new
    return 0.0


def _inside_bytes(graph: Any, op: Any, new: float) -> float:
    """Returns the bytes that the graphs inside an op need beyond its outputs."""
    _, inner = graph_work.inside(graph, op)
    if not inner or is_cluster(op, inner):
        return 0.0
    return max(0.0, max(peak_bytes(one) for one in inner) - new)


def _appended(op: Any) -> float:
    """Returns the bytes that a loop appends to lists, which stay after it."""
    if op.type not in ("While", "StatelessWhile"):
        return 0.0
    times, inner = graph_work.inside(op.graph, op)
    found = 0.0
    for graph in inner:
        for one in graph.get_operations():
            if one.type in (_APPEND, _SET):
                item = one.inputs[-1]
                found += graph_work.size(item) * (item.dtype.size or 0)
    return times * found
