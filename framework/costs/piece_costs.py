"""Estimates the cost of a piece, by which a model is partitioned: the time of its work."""

from __future__ import annotations

from tekso.framework.costs.device_types import find
from tekso.framework.costs.piece_traces import PieceTrace

BACKWARD = 2.0  # a backward pass computes the gradients of both factors of every product


def cost_of(trace: PieceTrace) -> float:
    """Returns the estimated seconds of forward and backward over a micro-batch on a CPU.

    Only the ratios of costs are used. Operations and moved bytes are weighted as for the device
    type `cpu`.
    """
    kind = find("cpu")
    flops_per_s = kind.flops_per_s["float32"] * kind.reached
    forward = trace.flops / flops_per_s + trace.bytes_moved / kind.memory_bytes_per_s
    return (1.0 + BACKWARD) * forward
