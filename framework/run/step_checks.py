"""Checks the figures of every training step for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tekso.framework import watchdog
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.learning_step import LearnerBase, NonFiniteStepsError
from tekso.framework.run import replay
from tekso.framework.run.checkpoints import Description
from tekso.framework.run.incidents import Incidents
from tekso.framework.run.process_group import ProcessGroup

Figures = Mapping[str, Any]
_IN_A_ROW = "nonfinite_consecutive"
_COUNTED = "nonfinite_counted"  # with a loss scale: those that it did not cause


class StepChecks:
    """Checks steps one call late, so that no step waits; records the first of every series.

    Args:
      learner: raises an error after too many steps in a row that are not finite.
      program: runs the steps.
      incidents: records incidents; None: another process does.
      group: the processes of the run.
    """

    def __init__(
        self,
        learner: LearnerBase,
        program: ExecutionProgram,
        incidents: Incidents | None,
        group: ProcessGroup,
    ) -> None:
        self._learner, self._program = learner, program
        self._incidents, self._group = incidents, group
        # Steps done and the figures of the last of them, when checked and when the last call ended.
        self._checked: tuple[int, Figures] = (0, {})
        self._newest: tuple[int, Figures] = (0, {})

    def ran(self, step: int, figures: Figures) -> None:
        """Takes the number of steps done after a call, and the figures of the last of them."""
        self._newest = (step, figures)

    def check(self, step: int, figures: Figures, description: Description) -> None:
        """Records an incident if this is the first step of a series that was not finite.

        Args:
          step: number of steps done when the figures were computed.
          figures: figures of the last of them; empty: there was none in this process.
          description: description of the run's checkpoints.

        Raises:
          NonFiniteStepsError: too many steps in a row were not finite.
        """
        if not figures:
            return
        with watchdog.waiting(f"the figures of a step{self._group.others()}"):
            self._check(step, figures, description)

    def _check(self, step: int, figures: Figures, description: Description) -> None:
        is_new, self._checked = self._checked[0] != step, (step, figures)
        if is_new and self._incidents is not None and int(figures[_IN_A_ROW]) == 1:
            done, newest = self._newest
            is_same = done - int(newest[_IN_A_ROW]) == step - 1  # no later step was applied
            program = self._program if is_same and self._group.size == 1 else None
            self._incidents.record(step - 1, figures, description, program)
        try:
            self._learner.check(figures)
        except NonFiniteStepsError as error:
            if int(figures[_IN_A_ROW]) < step:
                raise
            raise _none_was_finite(step, "so far") from error  # not by a learning rate

    def check_end(self, steps: int) -> None:
        """Checks after the last step of a run that at least one step changed the weights.

        It does nothing if this process ran no step. Steps that only needed a smaller loss scale are
        not counted.

        Raises:
          NonFiniteStepsError: all steps of the run were skipped.
        """
        _, figures = self._checked
        consecutive = int(figures.get(_IN_A_ROW, 0))
        if steps < 1 or int(figures.get(_COUNTED, consecutive)) < steps:
            return
        raise _none_was_finite(steps, "of the run")

    def series(self) -> tuple[int, int]:
        """Returns the first step of the series that was checked last, and the step after it."""
        end, figures = self._checked
        return end - int(figures[_IN_A_ROW]), end

    def cause(self) -> str:
        """Returns sentences that name what was not finite first in the last incident."""
        found = self._incidents
        text = "" if found is None else replay.explanation(found.last, found.imports)
        cause: str = self._group.from_first(text)
        return cause


def _none_was_finite(steps: int, which: str) -> NonFiniteStepsError:
    all_steps = "the only step" if steps == 1 else f"all {steps} steps"
    return NonFiniteStepsError(
        f"{all_steps} {which} had a loss or gradients that were not finite, so no step changed the "
        "weights: they are the initial ones. Look for a logarithm or a root of a number that is "
        "not above 0, a division by 0, an overflow, or NaN in the data."
    )
