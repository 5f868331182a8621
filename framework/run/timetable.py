"""The timetable of a training run: which steps are reported, evaluated and saved."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The intervals of reports, evaluations and checkpoints; 0 means only at the end.

    Attributes:
      steps: number of steps of the whole run.
      log_every: steps between two reports.
      eval_every: steps between two evaluations.
      checkpoint_every: steps between two checkpoints.
      steps_per_call: steps that a program may run in one call.
    """

    steps: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    steps_per_call: int = 1

    def logs(self, step: int) -> bool:
        """Whether a step is reported: the first, the last, and every `log_every` steps."""
        return step in (1, self.steps) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether evaluations are due after a step."""
        return step == self.steps or self._is_multiple(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return step == self.steps or self._is_multiple(step, self.checkpoint_every)

    def steps_until_due(self, step: int) -> int:
        """Number of steps after `step` until an evaluation or a checkpoint is due, or the end."""
        intervals = [every for every in (self.eval_every, self.checkpoint_every) if every]
        return min([self.steps - step, *(every - step % every for every in intervals)])

    @staticmethod
    def _is_multiple(step: int, every: int) -> bool:
        return bool(every) and step > 0 and step % every == 0
