"""Checks the schedules of a run, and the number of steps in a call.

Schedules may have values that no learning rate can have, or warm-ups that never end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tekso.framework.counting import counted
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.learning_step import LearnerBase
from tekso.framework.schedules import Schedule
from tekso.framework.weight_spec import WeightSpec


def check_values(schedule: Schedule, steps: int) -> None:
    """Checks the values of a schedule at some steps of a run.

    Args:
      schedule: the schedule.
      steps: number of steps of the run.

    Raises:
      ValueError: a value is negative, infinite or NaN; the message names the schedule and the step.
    """
    warmup = schedule.params.warmup_steps
    some = {0, 1, warmup - 1, warmup, *(steps * i // 8 for i in range(8)), steps - 1}
    for step in sorted(step for step in some if 0 <= step < max(steps, 1)):
        value = float(schedule(step))
        if not 0.0 <= value < math.inf:
            path = schedule.params.path_of("").rstrip(".")
            raise ValueError(
                f"{path} ({type(schedule).__name__}) gives the learning rate {value:g} at step "
                f"{step}; it must be finite, and 0 or more"
            )


def unfinished_warmups(schedule: Schedule, steps: int) -> list[str]:
    """Returns a warning for each warm-up that does not end within the steps of a run.

    Args:
      schedule: the schedule, which may consist of others.
      steps: number of steps of the run.
    """
    found = []
    warmup = schedule.params.warmup_steps
    if warmup > steps > 0:
        last, wanted = (float(schedule(step)) for step in (steps - 1, warmup))
        found.append(
            f"{schedule.params.path_of('warmup_steps')} is {warmup}, but the schedule ends "
            f"after {counted(steps, 'step', grouping='')}: its last value is {last:.2g}, and its "
            f"value after the warm-up would be {wanted:.2g}"
        )
    for part, own in schedule.parts(steps):
        found += unfinished_warmups(part, own)
    return found


def warnings(learner: LearnerBase, specs: Mapping[str, WeightSpec], steps: int) -> list[str]:
    """Returns the warnings about the schedules of all groups of weights, each of them once."""
    groups = [one for one, _ in learner.groups(specs).values()]
    found = [text for one in groups for text in unfinished_warmups(one.schedule, steps)]
    return list(dict.fromkeys(found))


def check_steps_per_call(given: int, concurrent: int) -> None:
    """Raises an ExecutionError if a call has fewer steps than are computed at the same time."""
    if given < concurrent:
        raise ExecutionError(
            f"run.steps_per_call is {given}, but the execution computes {concurrent} steps at the "
            "same time, so some workers would be idle. Set run.steps_per_call to at least "
            f"{concurrent}; {20 * concurrent} is better"
        )
