"""Following a run, on a program of a few NumPy lines: deleted checkpoints, and when it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import json
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tekso.framework.execution.shards import of_arrays
from tekso.framework.experiment import EarlyStopping, Run, Tree
from tekso.framework.input.skips import Skip, SkipReport
from tekso.framework.run import checkpoint_modes
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.label_limits import LabelLimit
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.loss_check import Findings
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report.console import PlainConsole
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification


class FakeProgram:
    """The loss is the weight."""

    w = np.zeros(())

    def restore(self, read: Callable[[str], np.ndarray], keys: Any) -> None:
        self.w = np.asarray(read("weights/w")[()])

    def eval_step(self, batch: Any) -> dict[str, tuple[float, float]]:
        return {"loss": (float(self.w), 1.0)}


class FakeTask:
    def check_batch(self, what: str, batch: Any) -> None:
        pass

    def summarize(self, sums: Any) -> dict[str, float]:
        return {name: value / weight for name, (value, weight) in sums.items()}


class FakeParts:
    eval_inputs: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.program, self.task = FakeProgram(), FakeTask()

    def eval_batches(self) -> Any:
        return {"dev": lambda start: iter([{"x": np.zeros(2)}])}

    def score(self, name: str, is_last: bool, stopped: Any) -> None:
        return None


class FakeJob:
    """A job in a folder; `tree` is what its params.txt holds."""

    def __init__(self, path: Path, *, steps: int, patience: int = 0) -> None:
        self.model, self.logdir = "m.Model", Logdir(str(path))
        self.output, self.tried, self.findings = io.StringIO(), 0, Findings()
        self.console = PlainConsole(self.output)
        run = Run.Params(steps=steps, early_stopping=EarlyStopping.Params(patience=patience))
        task = Classification.Params(model=Mlp.Params())
        self.tree: Any = Tree.Params(task=task, run=run, eval_inputs={"dev": Run.Params()})
        self.logdir.experiment = lambda: (self.model, self.tree)  # type: ignore[method-assign]

    def warn_of_data(self, parts: Any, trained: Description, *, trains: bool) -> None:
        pass

    def meet(self, *, checkpoint: str = "") -> Any:
        return contextlib.nullcontext(ProcessGroup())

    def assemble(self, group: ProcessGroup, *, trains: bool) -> FakeParts:
        return FakeParts()

    def try_task(self, parts: FakeParts, *, is_new: bool, trains: bool) -> Findings:
        assert not is_new
        self.tried += 1
        return self.findings

    def changes_since(self, checkpoint: Any) -> list[str]:
        return []

    def warn(self, lines: list[str]) -> None:
        for line in lines:
            self.console.line(line, "warning")

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.logdir.checkpoints, keep_last=2)

    def save(self, *steps: int) -> None:
        """Trains: saves checkpoints whose weight is a tenth of the step."""
        checkpoints = self.checkpoints()
        checkpoints.prepare()
        for step in steps:
            state = functools.partial(of_arrays, {"weights/w": np.asarray(step / 10)})
            checkpoints.save(state, Description(step=step, model=self.model, params="p"))
            checkpoints.wait()
        checkpoints.close()

    def follow(self, *while_waiting: Callable[[], None]) -> dict[int, float]:
        """Follows; the functions are called one after the other in the place of waiting."""
        left = iter(while_waiting)
        checkpoint_modes.follow(self, wait=lambda: next(left)())  # type: ignore[arg-type]
        assert next(left, None) is None, "it ended too early"
        lines = Path(self.logdir.file("evaluations.jsonl")).read_text().splitlines()
        records = [json.loads(line) for line in lines]
        found = {record["step"]: record["loss"] for record in records}
        assert len(found) == len(records), "a step is there twice"
        return found


def test_checkpoints_are_evaluated_in_order_until_the_last_step(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, steps=30)
    job.save(10)
    assert job.follow(lambda: job.save(20), lambda: None, lambda: job.save(30)) == {
        10: 1.0,
        20: 2.0,
        30: 3.0,
    }
    assert job.follow() == {10: 1.0, 20: 2.0, 30: 3.0}  # nothing is evaluated twice


def test_skipped_records_are_shown_once_by_each_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = FakeJob(tmp_path, steps=20)
    job.save(10, 20)
    report = SkipReport(1, (Skip("a.png", None, "damaged"),))
    monkeypatch.setattr(FakeParts, "eval_inputs", {"dev": SimpleNamespace(skipped=lambda: report)})
    job.follow()
    assert job.output.getvalue().count("warning: dev: 1 skipped\n  a.png: damaged") == 1
    checkpoint_modes.evaluate(job, job.checkpoints().open("20"))
    assert job.output.getvalue().count("warning: dev: 1 skipped\n  a.png: damaged") == 2


def test_labels_are_checked_in_every_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, steps=20)
    job.findings = Findings(unchecked=["not tried"], label_limits=(LabelLimit("tags", 3),))
    tags = np.array([0, 2])
    monkeypatch.setattr(
        FakeParts, "eval_batches", lambda _: {"dev": lambda _: iter([{"tags": tags}])}
    )
    job.save(10)
    assert job.follow(lambda: job.save(20)) == {10: 1.0, 20: 2.0}
    assert job.tried == job.output.getvalue().count("warning: not tried") == 1
    tags[1] = 3
    job.save(30)
    with pytest.raises(ValueError, match=r"^'tags' \(example 1 of .* has the label 3, but"):
        job.follow()


def test_a_line_has_the_metrics_of_the_goals_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = {"loss": (3.0, 2.0), "aaa": (1.0, 4.0), "accuracy": (1.0, 2.0)}
    monkeypatch.setattr(FakeProgram, "eval_step", lambda *_: sums)
    job: Any = FakeJob(tmp_path, steps=20)
    job.save(10)
    checkpoint_modes.evaluate(job, job.checkpoints().open("10"))
    assert "loss 1.5000  accuracy 0.5000  aaa 0.2500" in job.output.getvalue()


def test_waits_for_the_first_checkpoint(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, steps=10)
    assert job.follow(lambda: job.save(10)) == {10: 1.0}


def test_training_can_delete_a_checkpoint_once_its_weights_are_read(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, steps=30)
    job.save(10)
    assert job.follow(lambda: job.save(20, 30)) == {10: 1.0, 20: 2.0, 30: 3.0}
    assert job.checkpoints().steps() == [20, 30]  # the last save keeps two


def test_a_checkpoint_that_training_deletes_is_left_out_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, steps=40)
    job.save(10)
    no_locks = OSError(errno.ENOLCK, "No locks available")  # with locks, it is not deleted
    monkeypatch.setattr(fcntl, "flock", unittest.mock.Mock(side_effect=no_locks))
    restore = FakeProgram.restore

    def restore_late(self: FakeProgram, read: Any, keys: Any) -> None:
        monkeypatch.setattr(FakeProgram, "restore", restore)
        job.save(20, 30, 40)  # keeps two
        restore(self, read, keys)

    monkeypatch.setattr(FakeProgram, "restore", restore_late)
    assert job.follow() == {30: 3.0, 40: 4.0}
    assert "step 10 is skipped: training deleted the checkpoint" in job.output.getvalue()


def test_a_damaged_checkpoint_is_left_out_with_its_reason(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, steps=20)
    job.save(10, 20)
    (tmp_path / "checkpoints" / "step_00000010" / "checkpoint.json").write_text("{")
    assert job.follow() == {20: 2.0}
    assert "step 10 is skipped: " in job.output.getvalue()


def test_ends_where_early_stopping_ended_the_run(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, steps=1000, patience=1)
    job.save(10, 20)
    records = [{"step": step, "split": "dev", "loss": float(step)} for step in (10, 20)]
    metrics = Path(job.logdir.metrics)
    metrics.write_text(f"{json.dumps(records[0])}\n")

    def evaluate() -> None:
        metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    assert job.follow(lambda: None, evaluate) == {10: 1.0, 20: 2.0}
