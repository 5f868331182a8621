"""Simulates a schedule of a pipeline for given durations, without devices.

Each device runs its actions in order. An action starts as soon as the device is free and the inputs
of the action have arrived. Inputs from another device take the time of a handover, during which
both devices are free for other work.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping

from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Event,
    Kind,
    ScheduleError,
    by_device,
)
from tekso.framework.execution.pipeline.timing import StuckError, timed

Durations = Mapping[tuple[int, Kind], float] | Callable[[int, Kind], float]
"""Time of the work of (stage, kind), in any unit."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The actions of all devices with their times, simulated or measured.

    Attributes:
      events: actions with start and end; those of one device are in order.
      num_devices: number of devices; one may have no event.
      num_stages: number of stages.
    """

    events: tuple[Event, ...]
    num_devices: int
    num_stages: int

    @functools.cached_property
    def start(self) -> float:
        """Start of the first action."""
        return min((event.start for event in self.events), default=0.0)

    @functools.cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max((event.end for event in self.events), default=0.0) - self.start

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """Working time of each device."""
        spans: list[list[float]] = [[] for _ in range(self.num_devices)]
        for event in self.events:
            spans[event.action.device].append(event.end - event.start)
        return tuple(math.fsum(each) for each in spans)

    @functools.cached_property
    def idle_share(self) -> float:
        """Idle time of all devices / total time of all devices, 0 to 1."""
        total = self.num_devices * self.makespan
        return max(0.0, 1.0 - math.fsum(self.busy) / total) if total > 0 else 0.0

    @functools.cached_property
    def held(self) -> tuple[float, ...]:
        """For each device, the largest number of micro-batches with saved activations at once.

        The activations of a micro-batch at a stage are saved from the start of its forward pass to
        the end of the work that reads them last. If the schedule separates weight gradients, that
        is the weight gradient, because the products of a layer need the layer's input there.
        Otherwise it is the backward pass. On a device with V stages, each stage counts as 1/V of a
        micro-batch.
        """
        apart = any(event.action.kind == WEIGHT_GRADIENT for event in self.events)
        last = WEIGHT_GRADIENT if apart else BACKWARD
        now, most = [0] * self.num_devices, [0] * self.num_devices
        for event in self.events:
            device, kind = event.action.device, event.action.kind
            if kind == FORWARD:
                now[device] += 1
                most[device] = max(most[device], now[device])
            elif kind == last:
                now[device] -= 1
        return tuple(count * self.num_devices / self.num_stages for count in most)


def simulate(
    actions: Iterable[Action], *, num_devices: int, durations: Durations, handover: float = 0.0
) -> Timeline:
    """Returns the timeline of a schedule.

    Args:
      actions: actions of the schedule.
      num_devices: number of devices.
      durations: {(stage, kind): time}, or a function of stage and kind. In a schedule without
        separate weight gradients, "backward" is the time of both gradients.
      handover: time of a transfer from one device to another, in the same unit.

    Raises:
      ScheduleError: a duration is missing or negative, or no device can continue (`StuckError`).
    """
    orders = by_device(actions, num_devices)
    num_stages = 1 + max((a.stage for order in orders for a in order), default=0)
    takes = _durations({(a.stage, a.kind) for order in orders for a in order}, durations)
    _refuse_negative("handover", handover)
    found = timed(
        [[action[2:] for action in order] for order in orders],
        num_stages=num_stages,
        durations=takes,
        handover=handover,
    )
    if found.waits:
        raise StuckError(orders, found)
    events = (
        Event(action, start, end)
        for order, spans in zip(orders, found.spans, strict=True)
        for action, (start, end) in zip(order, spans, strict=True)
    )
    return Timeline(tuple(events), num_devices, num_stages)


def _durations(
    asked: Iterable[tuple[int, Kind]], durations: Durations
) -> dict[tuple[int, Kind], float]:
    found = {}
    for stage, kind in sorted(asked):
        if isinstance(durations, Mapping):
            if (stage, kind) not in durations:
                raise ScheduleError(
                    f"there is no duration for {kind} at stage {stage}; there are durations for: "
                    + ", ".join(f"{k} at stage {s}" for s, k in sorted(durations))
                )
            found[stage, kind] = durations[stage, kind]
        else:
            found[stage, kind] = durations(stage, kind)
        _refuse_negative(f"the duration of {kind} at stage {stage}", found[stage, kind])
    return found


def _refuse_negative(name: str, time: float) -> None:
    if not 0 <= time < math.inf:
        raise ScheduleError(f"{name} is {time!r}, but must be a finite time of at least 0")
