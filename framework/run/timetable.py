"""The intervals of reports, evaluations and checkpoints of a run."""

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
    """

    steps: int
    log_every: int
    eval_every: int
    checkpoint_every: int

    def logs(self, step: int) -> bool:
        """Whether a step is reported: the first, the last, and every `log_every` steps."""
        return step in (1, self.steps) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether evaluations are due after a step."""
        return step == self.steps or self._is_multiple(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return step == self.steps or self._is_multiple(step, self.checkpoint_every)

    @staticmethod
    def _is_multiple(step: int, every: int) -> bool:
        return bool(every) and step > 0 and step % every == 0
