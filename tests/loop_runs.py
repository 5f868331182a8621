"""Runs of the training loop on a program of a few NumPy lines."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tekso.framework.execution.shards import Shard, of_arrays
from tekso.framework.execution.state import Stored, checked_state
from tekso.framework.learner import NonFiniteStepsError
from tekso.framework.run import time_use
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.early_stopping_rule import EarlyStoppingRule
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.run.report.report import Report
from tekso.framework.run.timetable import Timetable
from tekso.framework.run.training_loop import Outcome, TrainingLoop
from tekso.framework.weight_spec import WeightSpec


class FakeProgram:
    """w += 0.1 * (mean of the batch - w) + noise of the step; the loss is (mean - w)**2."""

    def __init__(self, dim: int = 3, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.dim, self.at_step = dim, at_step
        self.w = np.full(dim, np.nan)
        self.calls: list[int] = []  # number of steps of each

    def specs(self) -> dict[str, WeightSpec]:
        return {"weights/w": WeightSpec("w", (self.dim,), ("embed",), init=None)}  # type: ignore[arg-type]

    def initialize(self) -> None:
        self.w = np.zeros(self.dim)

    def shards(self) -> Iterator[Shard]:
        return of_arrays({"weights/w": self.w.copy()})

    def restore(self, read: Callable[[str], Stored], keys: Any) -> None:
        checked_state(self.specs(), read, keys)
        self.w = np.array(read("weights/w")[(slice(0, self.dim),)])  # it may be a tensor

    def train_step(self, batch: Any, step: int) -> dict[str, Any]:
        self.at_step(step)
        with np.errstate(invalid="ignore"):
            error = batch["x"].mean(axis=0) - self.w
        noise = np.random.default_rng(step).normal(size=self.dim) * 0.01
        self.w = self.w + 0.1 * error + noise
        bad = not np.isfinite(error).all()
        return {"loss": np.sum(error**2), "learning_rate": 0.1, "nonfinite_consecutive": bad}

    def train_steps(self, batches: list[Any], step: int) -> list[dict[str, Any]]:
        self.calls.append(len(batches))
        return [self.train_step(batch, step + i) for i, batch in enumerate(batches)]

    def eval_step(self, batch: Any) -> dict[str, tuple[float, float]]:
        weight = batch["weights"].sum()
        error = (batch["x"] - self.w) * batch["weights"][:, None]
        return {"loss": (np.sum(error**2), weight), "error": (np.abs(error).sum(), weight)}


class FakeTask:
    def check_batch(self, what: str, batch: Any) -> None:
        if np.isneginf(batch["x"]).any():
            raise ValueError(f"{what}: x is too large")

    def count(self, batch: Any) -> tuple[int, str]:
        return len(batch["x"]), "examples"

    def summarize(self, sums: Any) -> dict[str, float]:
        return {name: value / weight for name, (value, weight) in sums.items() if weight}


class FakeLearner:
    def check(self, metrics: Any) -> None:
        if metrics["nonfinite_consecutive"]:
            raise NonFiniteStepsError("not finite")


def train_batches(start: int) -> Iterator[dict[str, np.ndarray]]:
    for step in range(start, 10**6):
        yield {"x": np.random.default_rng([7, step]).normal(size=(5, 3)) + 2.0}


def eval_batches(start: int) -> Iterator[dict[str, np.ndarray]]:
    for step in range(start, 2):
        x = np.random.default_rng([8, step]).normal(size=(2, 3)) + 2.0
        yield {"x": x, "weights": np.array([1.0, 1.0 - step])}


class Run:
    """A run in a folder; `train` is one process of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.output = io.StringIO()
        self.program = FakeProgram()

    def train(
        self,
        steps: int = 20,
        *,
        log_every: int = 1,
        eval_every: int = 5,
        checkpoint_every: int = 4,
        program: FakeProgram | None = None,
        evaluations: Any = None,
        batches: Any = train_batches,
        show_step: Callable[[], None] | None = None,
        score: Any = lambda name, is_last, stopped: None,
        early_stopping: EarlyStoppingRule | None = None,
        learner: Any = None,
        max_rollbacks: int = 0,
        incidents: Any = None,
        steps_per_call: int = 1,
        eval_data: str = "a",
        time_use: time_use.TimeUse | None = None,
        **options: Any,
    ) -> Outcome:
        self.program = program or FakeProgram()
        self.checkpoints = checkpoints = Checkpoints(
            str(self.path / "checkpoints"),
            warn=self.warnings.append,
            **{"keep_last": 50, "metric": "dev/loss", **options},  # type: ignore[arg-type]
        )
        checkpoints.prepare()
        report = Report(
            Logdir(str(self.path)),
            PlainConsole(self.output),
            title="m.Model",
            steps=steps,
            time_use=time_use,
        )
        loop = TrainingLoop(
            program=self.program,
            task=FakeTask(),
            learner=learner or FakeLearner(),
            max_rollbacks=max_rollbacks,
            incidents=incidents,
            batches=batches,
            eval_batches={"dev": eval_batches} if evaluations is None else evaluations,
            timetable=Timetable(steps, log_every, eval_every, checkpoint_every, steps_per_call),
            early_stopping=early_stopping,
            checkpoints=checkpoints,
            description=Description(
                step=0,
                model="m.Model",
                params="p",
                input={"seed": 3, "eval_data": {"dev": eval_data}},
            ),
            report=report,
            show_step=show_step,
            score=score,
        )
        try:
            return loop.run(loop.restore(checkpoints.resume()))
        finally:
            report.close()
            checkpoints.close()

    def records(self, split: str | None = None) -> list[dict[str, Any]]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [record for record in found if split in (None, record["split"])]

    def losses(self, split: str = "train") -> dict[int, float]:
        records = self.records(split)
        by_step = {record["step"]: record["loss"] for record in records}
        assert len(by_step) == len(records), "a step is there twice"
        return by_step

    def saved(self) -> list[int]:
        names = os.listdir(self.path / "checkpoints")
        return sorted(int(name.removeprefix("step_")) for name in names if name.startswith("step_"))
