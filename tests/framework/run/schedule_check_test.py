"""What is wrong with a schedule is said before the first step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import schedules
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.run import schedule_check


def test_a_warmup_that_does_not_end_in_the_run_is_a_warning() -> None:
    def warnings(schedule: schedules.Schedule.Params, steps: int) -> list[str]:
        learner = Learner.Params(optimizer=SGD.Params(), schedule=schedule)
        found = schedules.end_with_run(learner, steps).instantiate().schedule
        return schedule_check.unfinished_warmups(found, steps)

    cosine = schedules.Cosine.Params(initial_value=0.1, warmup_steps=50)
    assert warnings(cosine, 50) == warnings(cosine, 51) == warnings(cosine, 0) == []
    assert warnings(cosine, 21) == [
        "schedule.warmup_steps is 50, but the schedule ends after 21 steps: its last value is "
        "0.04, and its value after the warm-up would be 0.1"
    ]
    product = schedules.Product.Params(schedules=[cosine, schedules.Constant.Params(value=2.0)])
    (nested,) = warnings(product, 1)
    assert nested.startswith("schedule.schedules.0.warmup_steps is 50, but ")
    # In a sequence, the second schedule has the steps from its boundary on.
    parts = [schedules.Constant.Params(value=2.0), cosine]
    sequence = schedules.Sequence.Params(schedules=parts, boundaries=[60])
    assert warnings(sequence, 60) == warnings(sequence, 110) == []
    (late,) = warnings(sequence, 109)
    assert "schedules.1.warmup_steps is 50, but the schedule ends after 49 steps: " in late


class Odd(schedules.Schedule):
    """A schedule of a user's, with one value that no learning rate can have."""

    class Params(schedules.Schedule.Params):
        """Params of Odd."""

        last: float = param("The value of the last step.", default=0.1)

    def after_warmup(self, step: Any) -> Any:
        return tf.where(step < 19, 0.1, self.params.last)


@pytest.mark.parametrize(("value", "shown"), [(-0.1, "-0.1"), (math.nan, "nan"), (math.inf, "inf")])
def test_values_that_no_learning_rate_can_have_are_refused_before_the_first_step(
    value: float, shown: str
) -> None:
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Odd.Params(last=value)).instantiate()
    with pytest.raises(ValueError, match=rf"Odd\) gives the learning rate {shown} at step 19"):
        schedule_check.check_values(learner.schedule, steps=20)
    schedule_check.check_values(learner.schedule, steps=19)
    schedule_check.check_values(learner.schedule, steps=0)
