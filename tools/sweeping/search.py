"""Lets Optuna choose the settings of trials: at random, by TPE, or with successive halving.

    Optuna ── proposes ──► settings ──► runs of all seeds ──► mean of the best values ──► Optuna
                               └── tried before? ──► the value that they had ───────────► Optuna

The study is in a database in the folder of the sweep. A trial that was running when the sweep was
killed is resumed with its settings.

Optuna's samplers ignore failed trials, so they would choose settings near diverged ones again. A
trial without a finite evaluation is therefore reported as completed with an infinite value, which
is worse than all others.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekso.framework import files
from tekso.tools.command_errors import UsageError
from tekso.tools.sweeping import halving
from tekso.tools.sweeping.space import Varied

SEARCHES = ("random", "tpe", "halving")
_FILE, _STUDY = "optuna.db", "sweep"
_FEW_REPEATED = 10  # settings in a row that were tried before; then, Optuna is given untried ones
MOST_REPEATED = 100
"""Settings in a row that were tried before, after which a search of a range of floats ends."""
_Train = Callable[[int, Mapping[str, str], halving.Judge], float | None]


def check_installed() -> None:
    """Raises a UsageError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            f"--search={'|'.join(SEARCHES)} requires Optuna, which is not installed: pip install "
            "optuna, or try all values by --search=grid"
        )


def begin_again(folder: str) -> bool:
    """Removes the study in the folder of a sweep, unless a trial was judged; returns whether.

    Another study then proposes the same settings for a trial that was stopped, so that it resumes.

    Raises:
      UsageError: the study is damaged.
    """
    optuna: Any = importlib.import_module("optuna")
    path = files.join(folder, _FILE)
    if files.exists(path):
        study, states = _opened(optuna, folder), optuna.trial.TrialState
        if study.get_trials(states=(states.COMPLETE, states.PRUNED)):
            return False
        files.remove(path)
    return True


def _opened(optuna: Any, folder: str, **options: Any) -> Any:
    """Returns the study in a folder, with the options of a new one if there is none.

    Raises:
      UsageError: it is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = files.join(folder, _FILE)
    try:
        return optuna.create_study(
            study_name=_STUDY, storage=f"sqlite:///{path}", load_if_exists=True, **options
        )
    except Exception as error:
        if not type(error).__module__.startswith("sqlalchemy"):
            raise
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"{path} cannot be read as a study of Optuna: {why}. Restore it from a copy, or "
            "give another --logdir"
        ) from error


class Study:
    """A study of Optuna.

    Args:
      folder: folder of the sweep, on a local file system.
      search: one of `SEARCHES`.
      varied: the settings to choose.
      goal: "min" or "max": which value of a trial is best; also an attribute.
      seed: seed of the search; the number of each trial is added to it, so that a search that was
        killed chooses the settings that it would have chosen anyway.
      steps: training steps of a trial.

    Raises:
      UsageError: the study in the folder is damaged.
    """

    def __init__(
        self,
        folder: str,
        search: str,
        varied: Sequence[Varied],
        *,
        goal: str,
        seed: int,
        steps: int,
    ) -> None:
        self._optuna: Any = importlib.import_module("optuna")
        self._varied, self._seed, self.goal = varied, seed, goal
        samplers = self._optuna.samplers
        self._sampler = samplers.TPESampler if search == "tpe" else samplers.RandomSampler
        self._halves = search == "halving"
        pruner = (
            halving.pruner(self._optuna, steps)
            if self._halves
            else self._optuna.pruners.NopPruner()
        )
        direction = "minimize" if goal == "min" else "maximize"
        self._study = _opened(self._optuna, folder, pruner=pruner, direction=direction)

    @property
    def num_tried(self) -> int:
        """Number of different settings of trials that are finished."""
        return len(self._tried())

    @property
    def num_settings(self) -> int | None:
        """Number of different settings that there are; None: a range of floats has no number."""
        if any(one.range is not None and not one.range.is_whole for one in self._varied):
            return None
        return math.prod(len(one.choices) for one in self._varied)

    @property
    def best(self) -> tuple[dict[str, str], float] | None:
        """The settings with the best finite value, and the value; None: no trial has one."""
        found = [
            (frozen.value, dict(settings))
            for settings, frozen in self._tried().items()
            if frozen.value is not None and math.isfinite(frozen.value)
        ]
        if not found:
            return None
        value, settings = (max if self.goal == "max" else min)(found, key=lambda one: one[0])
        return settings, value

    @property
    def ends(self) -> dict[int, int]:
        """The step at which successive halving ended a trial, by the number of the trial."""
        return halving.ends(self._study)

    def run(self, trials: int, train: _Train) -> bool:
        """Runs trials until enough settings were tried, or all that there are.

        Returns False if it ends earlier because Optuna chose tried settings `MOST_REPEATED` times
        in a row. It chooses from a range of floats, so no untried setting is known.

        Args:
          trials: number of settings to try in the whole sweep.
          train: trains the trial with a number and its settings as long as a judge does not end
            it; returns its value, not finite if no evaluation was finite, or None if it failed. An
            exception leaves the trial to be resumed.
        """
        states = self._optuna.trial.TrialState
        for frozen in self._study.get_trials(states=(states.RUNNING,)):
            self._draw_for(frozen.number)
            self._train(self._optuna.trial.Trial(self._study, frozen._trial_id), train)
        size, repeated = self.num_settings, 0
        while self.num_tried < min(trials, size or trials):
            if repeated == MOST_REPEATED:
                return False
            if repeated == _FEW_REPEATED and size is not None:
                self._study.enqueue_trial(self._untried(size))
            self._draw_for(len(self._study.get_trials(deepcopy=False)))
            repeated = 0 if self._train(self._study.ask(), train) else repeated + 1
        return True

    def _draw_for(self, number: int) -> None:
        """Draws the next settings with the random numbers of a trial."""
        self._study.sampler = self._sampler(seed=self._seed + number)

    def _train(self, trial: Any, train: _Train) -> bool:
        """Trains a trial and reports its value; returns False if its settings were tried before."""
        tried, settings = self._tried(), self._settings(trial)
        before = tried.get(_key(settings))
        if before is not None:
            self._report(trial, before.value)
            return False
        judge = halving.HalvingJudge(self._study, trial) if self._halves else halving.Judge()
        value = train(trial.number, settings, judge)
        if value is not None and not math.isfinite(value):
            value = -math.inf if self.goal == "max" else math.inf
        self._report(trial, value)
        return True

    def _report(self, trial: Any, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def _tried(self) -> dict[tuple[tuple[str, str], ...], Any]:
        """Returns the first finished trial of Optuna with each settings."""
        states = self._optuna.trial.TrialState
        found: dict[tuple[tuple[str, str], ...], Any] = {}
        for frozen in self._study.get_trials(deepcopy=False):
            is_finished = frozen.state not in (states.RUNNING, states.WAITING)
            if is_finished and len(frozen.params) == len(self._varied):
                settings = {path: _text_of(value) for path, value in frozen.params.items()}
                found.setdefault(_key(settings), frozen)
        return found

    def _untried(self, size: int) -> dict[str, Any]:
        """Returns one of `size` settings, chosen at random; one of them must be untried."""
        tried = self._tried()
        draw = random.Random(self._seed + len(self._study.get_trials(deepcopy=False)))
        for number in itertools.count(draw.randrange(size)):
            values, rest = {}, number % size
            for one in self._varied:
                rest, index = divmod(rest, len(one.choices))
                values[one.path] = one.choices[index]
            if _key({path: _text_of(value) for path, value in values.items()}) not in tried:
                break
        return values

    def _settings(self, trial: Any) -> dict[str, str]:
        return {one.path: _text_of(self._suggested(trial, one)) for one in self._varied}

    @staticmethod
    def _suggested(trial: Any, one: Varied) -> Any:
        if one.range is None:
            return trial.suggest_categorical(one.path, list(one.values))
        suggest = trial.suggest_int if one.range.is_whole else trial.suggest_float
        return suggest(one.path, one.range.low, one.range.high, log=one.range.is_log)


def _key(settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))


def _text_of(value: Any) -> str:
    """Returns a chosen value as text for --set."""
    return value if isinstance(value, str) else repr(value)
