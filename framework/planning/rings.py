"""Costs of collectives, as rings over the devices of mesh axes: bytes sent and time.

n devices of an axis, S bytes in the buffer of a device:

    all-reduce      2 (n-1)/n S in 2 (n-1) hops     reduce-scatter, all-gather  (n-1)/n S, n-1 hops
    all-to-all        (n-1)/n S in n-1 hops

Devices are numbered along the last axis of a mesh first. A ring uses the fast links of a node only
if it fits into one node.

Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters".
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.mesh.rules import MeshShape

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
ACTIVATIONS, GRADIENTS, WEIGHTS = "activations", "gradients", "weights"


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """The total cost of all collectives of one kind over the same axes in a step.

    Attributes:
      kind, axes: as in collectives.py.
      of: the tensors: activations (and their gradients), gradients of weights, or weights.
      count: number of collectives.
      bytes: bytes of the buffers on one device: the tensor that is reduced or exchanged, or the
        result of a gather.
      sent_bytes: bytes that one device sends.
      seconds: time.
    """

    kind: Kind
    axes: tuple[str, ...]
    of: str
    count: int
    bytes: float
    sent_bytes: float
    seconds: float


def ring(kind: Kind, n: int, size_bytes: float) -> tuple[float, int]:
    """Returns the bytes that one of n devices sends, and the number of sequential hops."""
    if n == 1:
        return 0.0, 0
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (n - 1) / n * size_bytes, rounds * (n - 1)


class Bill:
    """Totals of collectives, by kind, axes and tensors."""

    def __init__(self, mesh: MeshShape, device: DeviceType, rows: dict[Any, Any]) -> None:
        self.rows: dict[tuple[Kind, tuple[str, ...], str], tuple[int, float, float, float]] = rows
        self._sizes, self._device = dict(mesh.axes), device
        # Neighbours along the last axis have consecutive numbers.
        self._spans, span = {}, 1
        for name, size in reversed(mesh.axes):
            span *= size
            self._spans[name] = span

    def add(
        self, kind: Kind, axes: tuple[str, ...], of: str, size_bytes: float, count: int
    ) -> None:
        """Adds `count` collectives over axes; nothing if the axes have a single device."""
        n = math.prod(self._sizes[axis] for axis in axes)
        if n == 1 or not count:
            return
        sent, hops = ring(kind, n, size_bytes)
        speed, latency = self._device.link(max(self._spans[axis] for axis in axes))
        seconds = sent / speed + hops * latency
        number, all_bytes, all_sent, time = self.rows.get((kind, axes, of), (0, 0.0, 0.0, 0.0))
        self.rows[kind, axes, of] = (
            number + count,
            all_bytes + size_bytes * count,
            all_sent + sent * count,
            time + seconds * count,
        )

    @property
    def seconds(self) -> float:
        """Time of all collectives, one after the other."""
        return sum(row[-1] for row in self.rows.values())

    def collectives(self) -> tuple[CollectiveCost, ...]:
        """Returns the totals, the longest first."""
        found = [
            CollectiveCost(*key, count, size, sent, seconds)
            for key, (count, size, sent, seconds) in self.rows.items()
        ]
        return tuple(sorted(found, key=lambda c: -c.seconds))
