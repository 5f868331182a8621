"""Checks a schedule before it runs: all work is done exactly once, and on the right device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tekso.framework.execution.errors import joined
from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    Work,
    WorkKey,
    by_device,
    device_of,
    listed,
)
from tekso.framework.execution.pipeline.schedule import PipelineSchedule, num_stages_of
from tekso.framework.execution.pipeline.timing import StuckError, timed
from tekso.framework.spelling import close_matches


def check(
    actions: Iterable[Action], *, num_devices: int, num_stages: int, num_micro_batches: int
) -> None:
    """Checks the actions of a schedule.

    Args:
      actions: in any order; the ticks order the actions of a device.
      num_devices: number of devices.
      num_stages: number of stages.
      num_micro_batches: number of micro-batches.

    Raises:
      ScheduleError: work is missing, done twice, on the wrong device or too early. If all work is
        there but no device can continue (`StuckError`), it names the work each device waits for.
    """
    sizes = {"devices": num_devices, "stages": num_stages, "micro-batches": num_micro_batches}
    _raise(
        [f"there are {n} {what}, expected 1 or more" for what, n in sizes.items() if n < 1], sizes
    )
    given = list(actions)
    _raise(list(_out_of_range(given, sizes)), sizes)
    _raise([*_misplaced(given, num_devices), *_counts(given, sizes), *_order(given)], sizes)
    orders = by_device(given, num_devices)
    units = {(stage, kind): 1.0 for stage in range(num_stages) for kind in KINDS}
    works = [[action[2:] for action in order] for order in orders]
    found = timed(works, num_stages=num_stages, durations=units)
    if found.waits:
        raise StuckError(orders, found)


def checked_actions(
    schedule: PipelineSchedule, *, num_devices: int, num_micro_batches: int
) -> list[Action]:
    """Returns the actions of all devices of a schedule, after checking them with `check`.

    Raises:
      ScheduleError: see `check`; or the schedule yields something other than actions.
    """
    num_stages = num_stages_of(schedule, num_devices)
    actions: list[Action] = listed(
        lambda: schedule.actions(num_devices, num_micro_batches),
        what=f"{type(schedule).__name__}.actions",
        kind=Action,
        most=len(KINDS) * num_stages * num_micro_batches,
    )
    check(
        actions,
        num_devices=num_devices,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
    )
    return actions


def _out_of_range(actions: list[Action], sizes: dict[str, int]) -> Iterable[str]:
    for action in actions:
        device, _, stage, micro_batch, kind = action
        if kind not in KINDS:
            close = close_matches(str(kind), KINDS, count=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{action}: kind is {kind!r}, expected one of {', '.join(KINDS)}{hint}"
        for number, (what, size) in zip((device, stage, micro_batch), sizes.items(), strict=True):
            if not 0 <= number < size:
                yield (
                    f"{action}: the {what} are numbered 0 to {size - 1}, and {number} is not one "
                    "of them"
                )


def _misplaced(actions: list[Action], num_devices: int) -> Iterable[str]:
    for action in actions:
        holder = device_of(action.stage, num_devices)
        if action.device != holder:
            yield f"{action.work} is on device {action.device}, but the stage is on device {holder}"


def _counts(actions: list[Action], sizes: dict[str, int]) -> Iterable[str]:
    """Yields a problem for each work that is done more than once, or is missing."""
    times: Counter[WorkKey] = Counter(action[2:] for action in actions)
    yield from (f"{Work(*key)} is done {n} times" for key, n in times.items() if n > 1)
    apart = sum(kind == WEIGHT_GRADIENT for _, _, kind in times)
    kinds = KINDS if apart else (FORWARD, BACKWARD)
    every = sizes["stages"] * sizes["micro-batches"]
    if len(times) == every * len(kinds):
        return
    mixed = (
        f" (there are {apart} of {every}; weight gradients are separate for all work or for none)"
    )
    for kind in kinds:
        for stage in range(sizes["stages"]):
            for micro_batch in range(sizes["micro-batches"]):
                work = Work(stage, micro_batch, kind)
                if work not in times:
                    yield f"{work} is missing{mixed if kind == WEIGHT_GRADIENT else ''}"


def _order(actions: list[Action]) -> Iterable[str]:
    """Yields a problem for two actions of a device at one tick, and for an action too early."""
    at: dict[tuple[int, int], Action] = {}
    ticks: dict[WorkKey, int] = {}
    for action in actions:
        device, tick = slot = action[:2]
        other = at.setdefault(slot, action)
        if other is not action:
            yield (
                f"device {device} has two actions at tick {tick}: {other.work}, and {action.work}"
            )
        ticks[action[2:]] = tick
    for (stage, micro_batch, kind), tick in ticks.items():
        if kind == FORWARD:
            continue
        before = Work(stage, micro_batch, FORWARD if kind == BACKWARD else BACKWARD)
        if ticks.get(before, tick) > tick:
            work = Work(stage, micro_batch, kind)
            yield f"{work}, at tick {tick}, comes before its {before.kind}, at tick {ticks[before]}"


def _raise(problems: list[str], sizes: dict[str, int]) -> None:
    if problems:
        of = ", ".join(f"{n} {what}" for what, n in sizes.items())
        lines = joined(problems, separator="\n  ")
        raise ScheduleError(f"the schedule does not work for {of}:\n  {lines}")
