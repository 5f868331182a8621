"""Estimates the time of a traced graph on one core, op by op, from the measured speed of a core.

    product, convolution    operations / rate at its operations per byte
    copy                    bytes read and written / bandwidth
    exponential, …          elements / rate
    other                   bytes read and written / bandwidth for as many bytes
    cluster of XLA          bytes of its inputs and outputs, and of its sums and copies, between
                            which it has separate loops, as above, plus the elements of its ops
    every op                plus the time of an op that does nothing

A product of fewer operations per byte than were measured is limited by its bytes: its rate falls
with them.

The body of a loop counts once per iteration. Ops without a path to an output do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tekso.framework.costs import graph_work
from tekso.framework.costs.this_machine import MachineSpeed, rate

_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
_CONVOLUTIONS = frozenset(
    {"Conv2D", "Conv3D", "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNative"}
)
_FILTERS = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"})
_FUNCTIONS = frozenset(
    {"Exp", "Log", "Log1p", "Tanh", "Sigmoid", "Erf", "Erfc", "Softplus", "Sin", "Cos", "Pow",
     "Softmax", "LogSoftmax", "Rsqrt", "Sqrt", "Elu", "Selu"}
)  # fmt: skip
_COPIES = frozenset(
    {"Transpose", "ConcatV2", "Pack", "Unpack", "Split", "SplitV", "Slice", "StridedSlice",
     "GatherV2", "GatherNd", "Tile", "Pad", "PadV2", "ReverseV2", "ScatterNd", "Cumsum",
     "TensorScatterAdd", "UnsortedSegmentSum", "StridedSliceGrad", "TensorListStack",
     "TensorListFromTensor", "ResizeBilinear", "TopKV2"}
)  # fmt: skip
_NOTHING = frozenset(
    {"Placeholder", "Const", "Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze",
     "StopGradient", "PreventGradient", "NoOp", "TensorListGetItem", "TensorListSetItem",
     "TensorListReserve", "TensorListPushBack", "TensorListPopBack", "EmptyTensorList",
     "Shape", "BroadcastGradientArgs", "OptionalFromValue"}
)  # fmt: skip


def seconds(graph: Any, machine: MachineSpeed) -> float:
    """Returns the estimated time of all ops of a graph on one core."""
    return math.fsum(_op_seconds(graph, op, machine) for op in needed(graph))


def needed(graph: Any) -> list[Any]:
    """Returns the ops on which an output of a function graph depends, in the order of the graph."""
    outputs = getattr(graph, "outputs", None)
    if outputs is None:
        return list(graph.get_operations())
    found, open_ops = set(), [t.op for t in outputs]
    open_ops += [op for op in graph.get_operations() if op.op_def and op.op_def.is_stateful]
    while open_ops:
        op = open_ops.pop()
        if op.name in found:
            continue
        found.add(op.name)
        open_ops += [t.op for t in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op.name in found]


def is_cluster(op: Any, inner: Sequence[Any]) -> bool:
    """Returns whether XLA compiles the function that an op calls."""
    for attributes in (op.node_def.attr, *(_attributes(graph) for graph in inner)):
        if "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b:
            return True
    return False


def _attributes(graph: Any) -> Any:
    definition = getattr(graph, "function_def", None)
    return definition.attr if definition is not None else {}


def _op_seconds(graph: Any, op: Any, machine: MachineSpeed) -> float:
    times, inner = graph_work.inside(graph, op)
    if inner:
        if is_cluster(op, inner):
            return times * _cluster_seconds(op, inner[0], machine)
        return machine.op_s + times * max(seconds(one, machine) for one in inner)
    if op.type in _NOTHING:
        return 0.0
    return machine.op_s + _work_seconds(op, machine)


def _work_seconds(op: Any, machine: MachineSpeed) -> float:
    moved = _bytes(op.inputs) + _bytes(op.outputs)
    points = {
        **dict.fromkeys(_PRODUCTS, machine.products),
        **dict.fromkeys(_CONVOLUTIONS, machine.convolutions),
        **dict.fromkeys(_FILTERS, machine.filter_gradients),
    }.get(op.type)
    if points is not None:
        flops = graph_work.op_flops(op)
        intensity = flops / max(moved, 1)
        reached = rate(points, intensity) * min(1.0, intensity / points[0][0])
        fixed = machine.product_s if op.type in _PRODUCTS else machine.convolution_s
        return fixed + flops / max(reached, 1.0)
    if op.type in _COPIES:
        outputs = _bytes(op.outputs)
        read = outputs if op.type.startswith("Gather") else _bytes(op.inputs)
        read = min(read, outputs) if op.type in ("Slice", "StridedSlice") else read
        return (read + outputs) / machine.moved_bytes_per_s
    found = moved / rate(machine.streams, moved)
    if op.type in _FUNCTIONS:
        found = max(found, _elements(op.outputs) / machine.functions_per_s)
    return found


def _cluster_seconds(op: Any, graph: Any, machine: MachineSpeed) -> float:
    moved = _bytes(op.inputs) + _bytes(op.outputs)
    work = 0.0
    for one in needed(graph):
        if one.type in graph_work.SUMS or one.type in _COPIES:  # a loop ends there
            moved += _bytes(one.inputs) + _bytes(one.outputs)
        times, inner = graph_work.inside(graph, one)
        if inner:
            work += times * max(_inner_work(g, machine) for g in inner)
        else:
            work += _element_seconds(one, machine)
    return machine.cluster_s + moved / rate(machine.cluster_streams, moved) + work


def _inner_work(graph: Any, machine: MachineSpeed) -> float:
    return math.fsum(_element_seconds(op, machine) for op in needed(graph))


def _element_seconds(op: Any, machine: MachineSpeed) -> float:
    if op.type in _NOTHING or op.type in ("Fill", "BroadcastTo", "Transpose"):
        return 0.0
    if op.type in _PRODUCTS or op.type in _CONVOLUTIONS or op.type in _FILTERS:
        return _work_seconds(op, machine)
    if op.type in _FUNCTIONS:
        return _elements(op.outputs) / machine.cluster_functions_per_s
    counted = op.inputs if op.type in graph_work.SUMS else op.outputs
    return _elements(counted) / machine.cluster_elements_per_s


def _bytes(tensors: Any) -> float:
    return float(sum(graph_work.size(t) * t.dtype.size for t in tensors if t.dtype.size))


def _elements(tensors: Any) -> float:
    return float(sum(graph_work.size(t) for t in tensors))
