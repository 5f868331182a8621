"""A fixed piece of work whose time shows whether other programs use the cores and the memory.

A thread for each core computes in its cache and copies memory, all at the same time:

    its CPU time            how fast the cores, their caches and the memory are now
    the time that passes    longer by the time in which other programs had the cores

It takes about 0.1 s for each core. It uses no TensorFlow, whose number of threads a process can set
only before its first op.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tekso.framework.cores import num_cores

_REPEATS = 15
_MOST_CORES = 8
_IN_CACHE = 1 << 15  # elements of an array that stays in the cache of a core
_FROM_MEMORY = 1 << 21  # of one that does not
_TIMES = 4  # functions of the small array for each copy of the large one
_BUSY = 1.5  # times that an idle machine takes; it scatters by a tenth or two
_FASTER = 1.2  # times the speed, from which on a machine counts as faster


@dataclasses.dataclass(frozen=True)
class Reference:
    """The time of the work.

    Attributes:
      cpu_s: CPU time of a core, the least of several repetitions.
      seconds: time that passes, the median of them.
    """

    cpu_s: float
    seconds: float

    @property
    def is_busy(self) -> bool:
        """Whether other programs used the cores."""
        return self.seconds > _BUSY * self.cpu_s

    def slowdown(self, before: Reference) -> float:
        """Returns how many times as long as on an idle machine the work takes.

        Args:
          before: an earlier measurement, whose CPU time is that of the idle machine.
        """
        return self.seconds / before.cpu_s

    def is_slower(self, before: Reference) -> bool:
        """Whether the work takes clearly longer than on the idle machine of before."""
        return self.slowdown(before) > _BUSY

    def reason_to_repeat(self, before: Reference) -> str:
        """Returns why speeds that were measured before are out of date, or ""."""
        if self.cpu_s * _FASTER < before.cpu_s:
            faster = before.cpu_s / self.cpu_s
            return f"it is {faster:.1f} times as fast now as when its speed was measured"
        if before.is_busy and not self.is_busy:
            return "other programs used it when its speed was measured, and it is idle now"
        return ""


def together(found: Sequence[Reference]) -> Reference:
    """Returns measurements as one: the fastest core, and the busiest moment."""
    return Reference(min(one.cpu_s for one in found), max(one.seconds for one in found))


def measure() -> Reference:
    """Does the work; returns its time."""
    cores = min(num_cores(), _MOST_CORES)
    works = [_Work() for _ in range(cores)]
    start = threading.Barrier(cores)
    times = np.zeros([cores, _REPEATS, 3])  # start, end, CPU time

    def repeat(number: int) -> None:
        works[number].do()
        for i in range(_REPEATS):
            start.wait()
            begin, busy = time.perf_counter(), time.thread_time()
            works[number].do()
            times[number, i] = begin, time.perf_counter(), time.thread_time() - busy

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return of_times(times)


def of_times(times: Any) -> Reference:
    """Returns the time of the work from [core, repetition, (start, end, CPU time)]."""
    passed = times[:, :, 1].max(0) - times[:, :, 0].min(0)
    return Reference(float(times[:, :, 2].mean(0).min()), float(np.median(passed)))


class _Work:
    """The work of a core."""

    def __init__(self) -> None:
        self._few = np.linspace(0.1, 1.0, _IN_CACHE)
        self._many = np.ones(_FROM_MEMORY, np.float32)
        self._copy = np.empty_like(self._many)

    def do(self) -> None:
        """Does it; NumPy's functions let other threads run."""
        for _ in range(_TIMES):
            np.cos(self._few, out=self._few)
        np.copyto(self._copy, self._many)
