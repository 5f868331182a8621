"""The memory that this process may use: that of the machine, or less.

machine                        psutil
control group                  of a container, a job of Slurm or a service of systemd
address space (`ulimit -v`)    of the process
"""

from __future__ import annotations

import psutil

from tekso.framework import control_groups, out_of_memory


def memory_bytes() -> float:
    """Returns the least of all limits of the memory of this process."""
    found = [psutil.virtual_memory().total]
    address_space = out_of_memory.limit_bytes()
    if address_space is not None:
        found.append(address_space)
    for words in control_groups.limits(
        "memory", file="memory.max", files_of_version_1=("memory.limit_in_bytes",)
    ):
        found += [int(word) for word in words if word != "max"]
    return float(min(found))
