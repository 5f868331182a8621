"""Estimates the time of a graph on a TPU core op by op, without fusion.

An op takes the time of its products or that of its memory, whichever is longer. A TPU stores the
last dim of a tensor in registers of 128 elements, and its matrix unit multiplies 128 channels with
128 channels: fewer channels take as long as 128. Tensors are bfloat16.

Source: Jouppi et al. 2020, "A domain-specific supercomputer for training deep neural networks",
CACM 63(7); cloud.google.com/tpu/docs/performance-guide.
"""

from __future__ import annotations

import math
from typing import Any

from tekso.framework.costs import graph_work, op_kinds
from tekso.framework.costs.device_types import DeviceType

_LANES = 128
_BYTES = 2  # of a number in bfloat16


def tpu_seconds(graph: Any, device: DeviceType) -> float:
    """Returns the seconds of all ops of a graph, including ops inside loops and function calls."""
    flops_per_s = device.flops_per_s["bfloat16"] * device.reached
    seconds = 0.0
    for op in graph.get_operations():
        times, inner = graph_work.inside(op)
        if inner:
            seconds += times * max(tpu_seconds(one, device) for one in inner)
            continue
        if op.type in op_kinds.FREE or not any(t.dtype.is_floating for t in op.outputs):
            continue
        moved = sum(_padded(t) for t in (*op.inputs, *op.outputs) if t.dtype.is_floating)
        computing = _product_flops(op) / flops_per_s
        seconds += max(computing, _BYTES * moved / device.memory_bytes_per_s)
    return seconds


def _product_flops(op: Any) -> float:
    """Returns the operations of a product or convolution, with all channels of its tiles."""
    if op.type not in op_kinds.PRODUCTS:
        return 0.0
    flops = graph_work.op_flops(op)
    if op.type in ("Conv2D", "Conv3D"):
        for channels in op.inputs[1].shape.as_list()[-2:]:
            flops *= _rounded(channels) / channels
    return flops


def _padded(tensor: Any) -> int:
    """Returns the number of elements with the last dim filled up to whole registers."""
    shape = tensor.shape
    if not shape.rank:
        return 0
    rows: list[int] = [n or 1 for n in shape.as_list()[:-1]]
    return math.prod(rows) * _rounded(shape[-1] or 1)


def _rounded(channels: int) -> int:
    return _LANES * math.ceil(channels / _LANES)
