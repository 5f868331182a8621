"""Lets Optuna choose the settings of trials: at random, by TPE, or with successive halving.

    Optuna ── ask ──► settings ──► runs of all seeds ──► mean of the best values ── tell ─► Optuna

The study is in a database in the folder of the sweep. A trial that was running when the sweep was
killed is resumed with its settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekso.framework import files
from tekso.tools.command_errors import UsageError
from tekso.tools.sweeping.space import Varied

SEARCHES = ("random", "tpe", "halving")
_STUDY = "sweep"


def check_installed() -> None:
    """Raises a UsageError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            f"--search={'|'.join(SEARCHES)} requires Optuna, which is not installed: pip install "
            "optuna, or try all values by --search=grid"
        )


class Study:
    """A study of Optuna.

    Args:
      folder: folder of the sweep, on a local file system.
      search: one of `SEARCHES`.
      varied: the settings to choose.
      goal: "min" or "max".
      seed: seed of the search; the number of each trial is added to it, so that a search that was
        killed chooses the settings that it would have chosen anyway.
    """

    def __init__(
        self, folder: str, search: str, varied: Sequence[Varied], *, goal: str, seed: int
    ) -> None:
        self._optuna: Any = importlib.import_module("optuna")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._varied = varied
        samplers = self._optuna.samplers
        self._sampler = samplers.TPESampler if search == "tpe" else samplers.RandomSampler
        self._seed = seed
        pruner = (
            self._optuna.pruners.SuccessiveHalvingPruner()
            if search == "halving"
            else self._optuna.pruners.NopPruner()
        )
        self._study = self._optuna.create_study(
            study_name=_STUDY,
            storage=f"sqlite:///{files.join(folder, 'optuna.db')}",
            pruner=pruner,
            direction="minimize" if goal == "min" else "maximize",
            load_if_exists=True,
        )

    def run(
        self, trials: int, train: Callable[[int, Mapping[str, str], Any], float | None]
    ) -> None:
        """Runs trials until there are as many as wanted.

        Args:
          trials: number of trials of the whole sweep.
          train: trains the trial with a number, its settings and Optuna's trial; returns its
            value, or None if it diverged. An exception leaves the trial to be resumed.
        """
        states = self._optuna.trial.TrialState
        for frozen in self._study.get_trials(states=(states.RUNNING,)):
            self._draw_for(frozen.number)
            self._train(self._optuna.trial.Trial(self._study, frozen._trial_id), train)
        while (number := len(self._study.get_trials(deepcopy=False))) < trials:
            self._draw_for(number)
            self._train(self._study.ask(), train)

    def _draw_for(self, number: int) -> None:
        """Draws the next settings with the random numbers of a trial."""
        self._study.sampler = self._sampler(seed=self._seed + number)

    def _train(
        self, trial: Any, train: Callable[[int, Mapping[str, str], Any], float | None]
    ) -> None:
        states = self._optuna.trial.TrialState
        value = train(trial.number, self._settings(trial), trial)
        if value is None or not math.isfinite(value):
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, value)

    def _settings(self, trial: Any) -> dict[str, str]:
        return {one.path: repr_of(self._suggested(trial, one)) for one in self._varied}

    @staticmethod
    def _suggested(trial: Any, one: Varied) -> Any:
        if one.range is None:
            return trial.suggest_categorical(one.path, list(one.values))
        suggest = trial.suggest_int if one.range.is_whole else trial.suggest_float
        return suggest(one.path, one.range.low, one.range.high, log=one.range.is_log)


def repr_of(value: Any) -> str:
    """Returns a chosen value as text for --set."""
    return value if isinstance(value, str) else repr(value)
