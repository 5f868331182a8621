"""The number of CPU cores that this process may use."""

from __future__ import annotations

import functools
import math
import os

from tekso.framework import control_groups


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use.

    These are the cores on which it may run. If its control group limits its CPU time, as `docker
    run --cpus` does, they are as many as this time is worth, rounded up.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(allowed, _worth()))


@functools.cache
def _worth() -> int:
    """Returns the number of cores whose time the control groups allow."""
    found = [
        math.ceil(int(quota) / int(period))
        for quota, period in control_groups.limits(
            "cpu", file="cpu.max", files_of_version_1=("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        if quota not in ("max", "-1")
    ]
    return min(found, default=1 << 20)
