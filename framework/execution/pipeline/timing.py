"""Computes when each action starts and ends if every device runs its actions in order."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tekso.framework.execution.pipeline.actions import (
    Action,
    Kind,
    ScheduleError,
    Work,
    WorkKey,
    device_of,
    needs,
)

Span = tuple[float, float]
"""Start and end, in any unit of time."""


class Timed(NamedTuple):
    """The timing of the orders of all devices.

    Attributes:
      spans: for each device, start and end of its work, in order.
      waits: {device: work that its next work waits for}, for devices that cannot finish.
    """

    spans: list[list[Span]]
    waits: dict[int, WorkKey]


class StuckError(ScheduleError):
    """No device can continue, and work remains; the text says what each device waits for."""

    def __init__(self, orders: Sequence[Sequence[Action]], timed: Timed) -> None:
        places = {action.work: action for order in orders for action in order}
        lines = [
            f"\n  {_sentence(orders[device][len(timed.spans[device])], Work(*need), places)}"
            for device, need in sorted(timed.waits.items())
        ]
        super().__init__(f"the schedule is stuck, no device can continue:{''.join(lines)}")


def timed(
    orders: Sequence[Sequence[WorkKey]],
    *,
    num_stages: int,
    durations: Mapping[tuple[int, Kind], float],
    handover: float = 0.0,
) -> Timed:
    """Returns when each piece of work starts and ends, as early as possible.

    Args:
      orders: the work of each device, in order.
      num_stages: number of stages.
      durations: duration of the work of every stage and kind.
      handover: time of a transfer from one device to another.
    """
    num_devices = len(orders)
    spans: list[list[Span]] = [[] for _ in orders]
    free = [0.0] * num_devices
    ends: dict[WorkKey, float] = {}
    waiting: dict[WorkKey, list[int]] = {}  # the devices that wait for the work
    awake = deque(range(num_devices))

    def advance(device: int) -> None:
        order, done = orders[device], spans[device]
        while len(done) < len(order):
            work, start = order[len(done)], free[device]
            for need in needs(work, num_stages):
                there = ends.get(need)
                if there is None:
                    waiting.setdefault(need, []).append(device)
                    return
                if device_of(need[0], num_devices) != device:
                    there += handover
                if there > start:
                    start = there
            stage, _, kind = work
            end = start + durations[stage, kind]
            done.append((start, end))
            ends[work] = free[device] = end
            if work in waiting:
                awake.extend(waiting.pop(work))

    while awake:
        advance(awake.popleft())
    return Timed(spans, {device: need for need, those in waiting.items() for device in those})


def in_ticks(orders: Iterable[Iterable[Work]], num_stages: int) -> Iterator[Action]:
    """Yields actions by tick, each as early as possible if all work takes one tick.

    If no device can continue, the remaining work gets later ticks in the order of each device. No
    work is lost, and `schedule_check.check` reports the problem.

    Args:
      orders: the work of each device, in order.
      num_stages: number of stages.
    """
    given = [list(order) for order in orders]
    units = defaultdict[tuple[int, Kind], float](lambda: 1.0)
    spans, waits = timed(given, num_stages=num_stages, durations=units)
    last = max((int(end) for each in spans for _, end in each), default=0)
    actions = []
    for device, (order, done) in enumerate(zip(given, spans, strict=True)):
        rest = range(last, last + len(order) - len(done)) if device in waits else ()
        ticks = itertools.chain((int(start) for start, _ in done), rest)
        actions += [Action(device, t, *work) for t, work in zip(ticks, order, strict=True)]
    yield from sorted(actions, key=lambda action: (action.tick, action.device))


def _sentence(action: Action, need: Work, places: Mapping[Work, Action]) -> str:
    place = places.get(need)
    where = (
        "no device does" if place is None else f"device {place.device} does at tick {place.tick}"
    )
    return (
        f"device {action.device}, tick {action.tick}: {action.work} waits for {need}, which {where}"
    )
