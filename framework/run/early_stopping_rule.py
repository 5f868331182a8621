"""The rule of early stopping: training ends when a metric does not improve any more.

The decision depends only on the evaluations that the run has reported so far. They are in
metrics.jsonl, so a resumed run decides like an uninterrupted one, and needs no further state. This
file loads no TensorFlow, as `tekso-compare` uses it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tekso.framework.run.report.lines import number

if TYPE_CHECKING:
    from tekso.framework.task import Goal

History = Sequence[tuple[int, float | None]]
"""The step and the value of every evaluation, in order; None: the value was not finite."""


@dataclasses.dataclass(frozen=True)
class EarlyStoppingRule:
    """The rule of `run.early_stopping`.

    Attributes:
      metric: "evaluation/metric".
      goal: whether the smallest or the largest value is best.
      patience: number of consecutive evaluations without an improvement after which training ends.
      min_improvement: by how much an evaluation must be better than the best one before it.
    """

    metric: str
    goal: Goal
    patience: int
    min_improvement: float = 0.0

    def reason(self, history: History) -> str:
        """Returns why training should end after these evaluations, or "" if it should continue.

        The first finite value counts as an improvement. A value that is not finite is none.
        """
        best: tuple[int, float] | None = None
        waited = 0
        for step, value in history:
            waited += 1
            if value is None or not math.isfinite(value):
                continue
            gain = math.inf if best is None else (best[1] - value) * (1 if self._is_min else -1)
            if gain > self.min_improvement:
                best, waited = (step, value), 0
        if waited < self.patience:
            return ""
        where = f" {number(best[1])} at step {best[0]}" if best else ""
        by = f" by more than {self.min_improvement:g}" if self.min_improvement else ""
        of = "had a finite value" if best is None else f"improved the best{where}{by}"
        if waited == 1:
            return f"the last evaluation of {self.metric} has not {of}"
        return f"none of the last {waited} evaluations of {self.metric} {of}"

    @property
    def _is_min(self) -> bool:
        return self.goal == "min"
