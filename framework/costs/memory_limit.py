"""The memory that this process may use: that of the machine, or less in a container.

machine                        psutil
control group (cgroup)         of a container, a Slurm job or a systemd service: its limit, and
                               the limits of the groups above it
address space (`ulimit -v`)    of the process
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from tekso.framework import out_of_memory

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_bytes() -> float:
    """Returns the least of all limits of the memory of this process."""
    address_space = out_of_memory.limit_bytes()
    found = [psutil.virtual_memory().total, *_group_limits()]
    return float(min(found if address_space is None else [*found, address_space]))


def _group_limits() -> Iterator[int]:
    """Yields the limits of the control group of this process, and of those above it."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:  # "0::/path" in version 2, "4:memory:/path" in version 1
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = _GROUPS / "memory" if kinds else _GROUPS
        file = "memory.limit_in_bytes" if kinds else "memory.max"
        # In a container, the group of the path may be outside, and its own group is the root.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield from _limit(folder / file)


def _limit(path: Path) -> Iterator[int]:
    try:
        yield int(path.read_text())
    except (OSError, ValueError):  # there is no such group, or "max"
        return
