"""Distillation: a small classifier of digits learns from the checkpoint of a residual network.

`Distilled` needs a run of `image.digits.Cnn`: --set run.warm_start.teacher.checkpoint=RUN
"""

from __future__ import annotations

from typing import Any

from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.framework.warm_start import WarmStart
from tekso.models import mlp
from tekso.params.image import digits
from tekso.tasks.multi.distillation import Distillation


@register
class Student(digits.Mlp):
    """One hidden layer of 16 units on digits, without a teacher: the baseline of Distilled."""

    def task(self) -> Params:
        """Mlp of one small layer."""
        return super().task().set(model=mlp.Mlp.Params(hidden_dims=[16]), label_smoothing=0.0)


@register
class Distilled(Student):
    """Student, distilled from `image.digits.Cnn`: set run.warm_start.teacher.checkpoint."""

    def task(self) -> Params:
        """The student, and the residual network as its teacher."""
        student: Any = super().task()
        teacher: Any = digits.Cnn().task()
        return Distillation.Params(student=student, teacher=teacher, temperature=4.0, weight=0.9)

    def run(self) -> Params:
        """As Student; the teacher's weights come from the run that you name."""
        teacher = WarmStart.Params(
            only=["teacher/.*"], ignore=["student/.*"], rules={"teacher/(.*)": r"\1"}
        )
        return super().run().set(warm_start={"teacher": teacher})
