"""The estimated time of a step on the cores of this machine."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """The time of a step.

    Attributes:
      seconds: elapsed time.
      core_seconds: CPU time of all cores together.
      start_seconds: the part of `core_seconds` in calls from Python and, on a mesh, in starts of
        ops and collectives.
    """

    seconds: float
    core_seconds: float
    start_seconds: float
