"""Stand-ins for the trainer and for Optuna, for tests of tekso-sweep."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RATE = "learner.schedule.initial_value"
TINY = "--model=lm.python_source.Tiny"
PARAMS = """# model: lm.python_source.Tiny
learner.schedule.initial_value : {rate}  # --set
run.seed : {seed}  # --seed
"""


class FakeTrainer:
    """Stands for the process of a trial: writes what a run leaves; some end early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.codes: dict[str, int] = {}
        self.evaluates = True
        self.splits = ["dev"]  # of the records of a trial
        self.metric = "loss"
        self.ended: list[str] = []

        real = subprocess.Popen

        def popen(words: list[str], **options: Any) -> Any:
            if "tekso.tools.trainer" not in words:  # another program, which a library calls
                return real(words, **options)
            flags = dict(word.removeprefix("--").split("=", 1) for word in words[3:])
            logdir = Path(flags["logdir"])
            self.trained.append(logdir.name)
            rate = next(w for w in words if w.startswith(f"--set={RATE}")).rpartition("=")[2]
            text = PARAMS.format(rate=rate, seed=flags["seed"])
            (logdir / "params.txt").write_text(text)
            loss = 100 * float(rate) + int(flags["seed"])
            records = [
                {"step": 9 - len(self.splits) + i, "split": split, self.metric: loss}
                for i, split in enumerate(self.splits)
            ]
            if not self.evaluates:
                records = [{"step": 8, "split": "train", "loss": None}]
            (logdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
            options["stdout"].write(b"the last words\n")
            return self._process(logdir.name)

        monkeypatch.setattr(subprocess, "Popen", popen)

    def _process(self, name: str) -> Any:
        """Returns a process that has not ended when the sweep looks for the first time."""
        waits = iter([subprocess.TimeoutExpired("trainer", 1.0)])

        def wait(timeout: float | None = None) -> int:
            if timeout is not None and (error := next(waits, None)):
                raise error
            return self.codes.get(name, 0)

        return SimpleNamespace(
            wait=wait, send_signal=None, terminate=lambda: self.ended.append(name)
        )


class FakeOptuna:
    """The part of Optuna's interface that a search uses, with a study in memory."""

    def __init__(self) -> None:
        self.trials: list[Any] = []
        self.sampler = ""
        states = SimpleNamespace(
            RUNNING="running",
            FAIL="fail",
            COMPLETE="complete",
            PRUNED="pruned",
            WAITING="waiting",
        )
        self.queue: list[dict[str, Any]] = []
        self.trial = SimpleNamespace(TrialState=states, Trial=lambda study, id: self.trials[id])
        self.logging = SimpleNamespace(set_verbosity=lambda level: None, WARNING=30)
        self.samplers = SimpleNamespace(
            TPESampler=lambda seed: f"tpe {seed}", RandomSampler=lambda seed: f"random {seed}"
        )
        self.pruners = SimpleNamespace(SuccessiveHalvingPruner=object, NopPruner=object)

    def create_study(self, **settings: Any) -> Any:
        self.settings = settings
        return self

    def get_trials(self, states: Any = None, deepcopy: bool = True) -> list[Any]:
        return [t for t in self.trials if states is None or t.state in states]

    def ask(self) -> Any:
        number = len(self.trials)
        fixed, params = self.queue.pop() if self.queue else {}, {}

        def chosen(path: str, value: Any) -> Any:
            return params.setdefault(path, fixed.get(path, value))

        trial = SimpleNamespace(
            number=number, _trial_id=number, state="running", value=None, params=params,
            user_attrs={},
            suggest_float=lambda path, low, high, log: chosen(path, low * (number + 1)),
            suggest_int=lambda path, low, high, log: chosen(path, low + number),
            suggest_categorical=lambda path, values: chosen(path, values[number % len(values)]),
        )  # fmt: skip
        self.trials.append(trial)
        return trial

    def enqueue_trial(self, params: dict[str, Any]) -> None:
        self.queue.append(params)

    def tell(self, trial: Any, value: float | None = None, state: str = "complete") -> None:
        trial.value, trial.state = value, state
