"""Measures the speed of training, and the share of the time in which it waits for input."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from tekso.framework.run.time_use import INPUT, TimeUse

_MEMORY = 0.8  # weight of the past in the running mean, from which the remaining time is estimated


@dataclasses.dataclass(frozen=True)
class Reading:
    """The pace since the previous reading.

    Attributes:
      units_per_s: units per second; the task determines the unit.
      wait_share: share of the time in which a step waited for its batch.
      seconds_per_step: running mean over the readings so far.
    """

    units_per_s: float
    wait_share: float
    seconds_per_step: float


class Pace:
    """A stopwatch for training.

    Args:
      clock: returns seconds.
      time_use: records what the time is spent on.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, time_use: TimeUse | None = None
    ) -> None:
        self._clock, self._time_use = clock, time_use or TimeUse()
        self._mean: float | None = None
        self.restart()

    def restart(self) -> None:
        """Begins a new interval."""
        self._begin = self._clock()
        self._paused_s = self._waited_s = 0.0
        self._units = self._steps = 0

    def step(self, units: int) -> None:
        """Counts a step that is done."""
        self._units += units
        self._steps += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the block as waiting for input."""
        begin = self._clock()
        with self._time_use.during(INPUT):
            yield
        self._waited_s += self._clock() - begin

    @contextlib.contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """Excludes the time of the block, which is spent on an activity, such as an evaluation."""
        begin = self._clock()
        try:
            with self._time_use.during(activity):
                yield
        finally:
            self._paused_s += self._clock() - begin

    def read(self) -> Reading | None:
        """Returns the pace of the interval, or None if it had no step; begins a new interval."""
        seconds = max(self._clock() - self._begin - self._paused_s, 1e-9)
        units, steps, waited = self._units, self._steps, self._waited_s
        self.restart()
        if not steps:
            return None
        now = seconds / steps
        self._mean = now if self._mean is None else _MEMORY * self._mean + (1 - _MEMORY) * now
        return Reading(units / seconds, min(1.0, waited / seconds), self._mean)
