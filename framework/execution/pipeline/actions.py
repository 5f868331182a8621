"""Actions of a pipeline's devices, and which work each piece of work waits for.

    forward(s, m)            waits for forward(s-1, m)
    backward(s, m)           waits for forward(s, m) and backward(s+1, m)
    weight_gradient(s, m)    waits for backward(s, m)

with s the stage and m the micro-batch, both counted from 0. Stages are counted in model order; with
K devices, device d holds the stages d, d+K, d+2K, …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple

from tekso.framework.execution.errors import ExecutionError

Kind = Literal["forward", "backward", "weight_gradient"]
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
WEIGHT_GRADIENT: Final = "weight_gradient"
KINDS: Final[tuple[Kind, ...]] = (FORWARD, BACKWARD, WEIGHT_GRADIENT)


class ScheduleError(ExecutionError):
    """A schedule is unknown, does not fit the devices and micro-batches, or does not work."""


WorkKey = tuple[int, int, Kind]
"""A `Work` as a plain tuple: it compares equal to the `Work` and is faster to create."""


class Work(NamedTuple):
    """A piece of work; str() returns its name for messages.

    Attributes:
      stage: number of the stage, from 0 in model order.
      micro_batch: number of the micro-batch, from 0.
      kind: "forward"; "backward": the gradients of inputs and weights, or of the inputs only if
        the schedule computes weight gradients separately; "weight_gradient".
    """

    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        kind = str(self.kind).replace("_", " ")
        return f"{kind} of micro-batch {self.micro_batch} at stage {self.stage}"


class Action(NamedTuple):
    """A piece of work with its device and tick; actions sort by device, then by tick.

    Attributes:
      device: number of the device.
      tick: position in time. It is used only to order the actions of a device.
      stage: see `Work`.
      micro_batch: see `Work`.
      kind: see `Work`.
    """

    device: int
    tick: int
    stage: int
    micro_batch: int
    kind: Kind

    @property
    def work(self) -> Work:
        """The work, without device and tick."""
        return Work(*self[2:])


class Event(NamedTuple):
    """An action with its start and end, measured in seconds or simulated in any unit."""

    action: Action
    start: float
    end: float


def device_of(stage: int, num_devices: int) -> int:
    """Returns the device that holds a stage."""
    return stage % num_devices


def needs(work: WorkKey, num_stages: int) -> tuple[WorkKey, ...]:
    """Returns the work that a piece of work waits for; see the module docstring."""
    stage, micro_batch, kind = work
    if kind == FORWARD:
        return ((stage - 1, micro_batch, FORWARD),) if stage else ()
    if kind == WEIGHT_GRADIENT:
        return ((stage, micro_batch, BACKWARD),)
    if stage + 1 < num_stages:
        return (stage, micro_batch, FORWARD), (stage + 1, micro_batch, BACKWARD)
    return ((stage, micro_batch, FORWARD),)


def by_device(actions: Iterable[Action], num_devices: int) -> list[list[Action]]:
    """Returns the actions of each device, sorted by tick.

    Raises:
      ScheduleError: an action is on a device that does not exist.
    """
    orders: list[list[Action]] = [[] for _ in range(num_devices)]
    for action in actions:
        if not 0 <= action.device < num_devices:
            raise ScheduleError(
                f"{action}: the devices are numbered 0 to {num_devices - 1}, and "
                f"{action.device} is not one of them"
            )
        orders[action.device].append(action)
    for order in orders:
        order.sort(key=lambda action: action.tick)
    return orders


def listed(
    made: Callable[[], Iterable[Any]], *, what: str, kind: type[Work] | type[Action], most: int
) -> list[Any]:
    """Returns the work or actions that user code yields, as a checked list.

    Args:
      made: the user code; returns an iterable.
      what: its name, for an error.
      kind: `Work` or `Action`; plain tuples with the same fields are converted.
      most: the maximum number of elements of a correct schedule.

    Raises:
      ScheduleError: it yields something else, or does not end.
    """
    expected = f"{kind.__name__}({', '.join(kind._fields)})"
    found, given = [], made()
    if not isinstance(given, Iterable):
        raise ScheduleError(f"{what} is {given!r}, expected an iterable of {expected}")
    for each in given:
        if not _is_tuple_of(kind, each):
            raise ScheduleError(
                f"{what} has {each!r}, expected {expected}: integers, and as the kind one of "
                f"{', '.join(KINDS)}"
            )
        found.append(kind(*each))
        if len(found) > 2 * most + 2:  # `schedule_check.check` names a few superfluous ones
            raise ScheduleError(
                f"{what} does not end: it yields more than {2 * most + 2} elements, and a correct "
                f"schedule has at most {most}"
            )
    return found


def _is_tuple_of(kind: type[Work] | type[Action], value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != len(kind._fields):
        return False
    *numbers, name = value
    return isinstance(name, str) and all(
        isinstance(n, int) and not isinstance(n, bool) for n in numbers
    )
