"""Successive halving by Optuna: ends a trial whose evaluations are worse than those of others.

    evaluations of a trial ── report ──► Optuna ── should_prune ──► the trial ends at this step
                                                                    (stored in the study)

The study stores the step at which a trial ends, because Optuna would not decide the same again
after the sweep was killed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tekso.tools.sweeping.trials import Evaluations

_ENDED_AT = "ended_at"  # attribute of a trial in the study: the step at which Optuna ended it


class Judge:
    """Judges a trial by all of its evaluations, and never ends it early."""

    def ends(self, evaluations: Callable[[], Evaluations]) -> bool:
        """Returns whether to end the trial here; called again and again while it trains.

        Args:
          evaluations: returns those of the trial so far.
        """
        del evaluations
        return False

    def counted(self, evaluations: Evaluations) -> Evaluations:
        """Returns the evaluations that count, of all those of a trial that has ended."""
        return evaluations


class HalvingJudge(Judge):
    """Ends a trial as successive halving decides.

    Args:
      study: Optuna's study, with the pruner of `pruner`.
      trial: Optuna's trial.
    """

    def __init__(self, study: Any, trial: Any) -> None:
        self._study, self._trial = study, trial
        self._reported: set[int] = set()

    def ends(self, evaluations: Callable[[], Evaluations]) -> bool:
        """See `Judge`; reports every new evaluation to Optuna."""
        return self._report(evaluations(), self._reported)

    def counted(self, evaluations: Evaluations) -> Evaluations:
        """See `Judge`: those up to the step at which the trial ends."""
        # Those of its last second, or of a process that was killed, were not reported.
        self._report(evaluations, set())
        # Without those after its end that the trainer ran before it noticed.
        trial = self._study.get_trials(deepcopy=False)[self._trial.number]
        return sorted(trial.intermediate_values.items()) or evaluations

    def _report(self, evaluations: Evaluations, reported: set[int]) -> bool:
        """Reports evaluations to Optuna one by one; returns whether Optuna ends the trial.

        Args:
          evaluations: those of the trial so far.
          reported: steps whose evaluations are reported already; the method adds to it.
        """
        if _ENDED_AT in self._trial.user_attrs:
            return True
        for step, value in evaluations:
            if value is None or step in reported:
                continue
            reported.add(step)
            with warnings.catch_warnings():  # a sweep that was killed may have reported it
                warnings.filterwarnings("ignore", message="The reported value is ignored")
                self._trial.report(value, step)
            if self._trial.should_prune():
                self._trial.set_user_attr(_ENDED_AT, step)
                return True
        return False


def pruner(optuna: Any, steps: int) -> Any:
    """Returns Optuna's pruner of successive halving, which compares trials after 1 % of the steps.

    Optuna would take 1 % of the first trial in the process, which may have diverged early.

    Args:
      optuna: the module.
      steps: training steps of a trial.
    """
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=max(steps // 100, 1))


def ends(study: Any) -> dict[int, int]:
    """Returns {number of a trial: the step at which it was ended}, without other trials."""
    trials = study.get_trials(deepcopy=False)
    return {t.number: t.user_attrs[_ENDED_AT] for t in trials if _ENDED_AT in t.user_attrs}
