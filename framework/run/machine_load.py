"""Measures how much of the cores other programs use during a run.

    CPU time of all programs (/proc/stat) - CPU time of this process and its children  =  of others

The time that the host of a virtual machine takes counts as that of other programs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle and iowait
_IDLE = 0.1  # share of the cores that others use, up to which a machine counts as idle


@dataclasses.dataclass(frozen=True)
class Load:
    """The CPU time that other programs used during a run.

    Attributes:
      cores: number of cores that the process may use.
      seconds: time in which it was measured.
      others_cpu_seconds: CPU time of other programs on these cores.
    """

    cores: int
    seconds: float
    others_cpu_seconds: float

    def text(self) -> str:
        """Returns a text for the figures of a run; "" if the machine was idle otherwise."""
        used = self.others_cpu_seconds / self.seconds if self.seconds else 0.0
        if used < _IDLE * self.cores:
            return ""
        of = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return f"beside other programs ({min(used, self.cores):.1f} of {of})"


def of_record(record: Any) -> Load | None:
    """Returns the load that `dataclasses.asdict` wrote to a record; None: there is none."""
    names = [field.name for field in dataclasses.fields(Load)]
    values = [record.get(name) for name in names] if isinstance(record, Mapping) else [None]
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            return None
    return Load(*values) if values[0] else None


def longest(records: Iterable[Any]) -> Load | None:
    """Returns the load of the longest time; None: no record has one."""
    found = [load for record in records if (load := of_record(record)) is not None]
    return max(found, key=lambda load: load.seconds, default=None)


Reading = tuple[float, float, float]
"""Time, CPU time of all programs on the cores of this process, and its own CPU time."""


def reading() -> Reading | None:
    """Returns what the times are now; None: the system does not say."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    try:
        lines = re.findall(r"^cpu(\d+) (.*)$", _STAT.read_text(), re.MULTILINE)
        spent = {int(core): [*map(int, rest.split())] for core, rest in lines}
        ticks = sum(spent[core][i] for core in cores for i in _BUSY)
        rate = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError):
        return None
    own = os.times()
    mine = own.user + own.system + own.children_user + own.children_system
    return (time.perf_counter(), ticks / rate, mine) if ticks else None


class MachineLoad:
    """Measures from its creation on, and adds what was measured before a run resumed.

    Args:
      read: returns the times now.
    """

    def __init__(self, read: Callable[[], Reading | None] = reading) -> None:
        self._read, self._begin = read, read()
        self._before: Load | None = None
        self._is_resumed = False

    def resume(self, before: Load | None) -> None:
        """Adds the load of earlier processes of the run; of several calls, the first counts."""
        if not self._is_resumed:
            self._is_resumed, self._before = True, before

    def now(self) -> Load | None:
        """Returns the load so far; None: it is unknown."""
        begin, end = self._begin, self._read()
        if begin is None or end is None:
            return None
        passed, busy, own = (after - before for before, after in zip(begin, end, strict=True))
        others = max(0.0, busy - own)
        if self._before is not None:
            passed += self._before.seconds
            others += self._before.others_cpu_seconds
        return Load(_num_cores(), passed, others)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
