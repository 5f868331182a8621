"""What training does and says: before it builds anything slow, and about faults of its input."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from small_tasks import Flowers, classifier

from tekso.framework.execution import DataParallel
from tekso.framework.execution.shards import of_arrays
from tekso.framework.exit_codes import ExitCode
from tekso.framework.experiment import Run, Tree
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.skips import Origin, SkipReport, Skips
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.out_of_memory import OutOfMemoryError
from tekso.framework.params import param
from tekso.framework.run import metric_changes, modes, run_messages
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.job import Job
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums
from tekso.models.layers.linear import Linear
from tekso.params.lm.python_source import Tiny
from tekso.tasks.classification.task import Classification


class Faulty(Flowers):
    """Skips an example of its third batch; there is no memory for the fifth."""

    class Params(Flowers.Params):
        """Params of Faulty."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self._skips = Skips(9, what="flowers")

    def batch(self, step: int) -> Any:
        """See Flowers."""
        if step == 2:
            self._skips.add(Origin("flowers", 7, "record"), "damaged")
        if step == 4:
            raise MemoryError("Unable to allocate 9 GiB")
        return super().batch(step)

    def skipped(self) -> SkipReport:
        """See Input."""
        return self._skips.report


def job_of(input: Flowers.Params, steps: int, folder: Path, output: io.StringIO) -> Job:
    tree = Tree.Params(
        task=classifier(3),
        learner=Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1)),
        input=input,
        execution=DataParallel.Params(towers=1, xla="none"),
        run=Run.Params(steps=steps),
    )
    return Job(
        model="a.B", tree=tree, registered=tree.copy(), logdir=Logdir(str(folder)),
        console=PlainConsole(output),
    )  # fmt: skip


def test_faults_of_the_input_are_shown_during_the_run(tmp_path: Path) -> None:
    output = io.StringIO()
    job = job_of(Faulty.Params(batch_size=4), 6, tmp_path, output)
    with pytest.raises(OutOfMemoryError) as caught:
        modes.train(job)
    assert str(caught.value).startswith("out of memory after step 4: Unable to allocate 9 GiB. ")
    assert output.getvalue().count("warning: input: 1 skipped\n  flowers, record 7: dam") == 1


def test_the_first_lines_say_how_many_weights_are_frozen(tmp_path: Path) -> None:
    for name, frozen, said in (("a", [], ""), ("b", [".*/w"], "; 69 of them are frozen")):
        output = io.StringIO()
        job = job_of(Flowers.Params(batch_size=4), 1, tmp_path / name, output)
        job.tree.set({"learner.frozen": frozen})
        assert modes.train(job) == ExitCode.OK
        (line,) = [one for one in output.getvalue().splitlines() if one.startswith("  model: ")]
        assert line.endswith(f" B{said}")


class Unread(Flowers):
    """Must not be read."""

    class Params(Flowers.Params):
        """Params of Unread."""

    def load(self, split: Any) -> Any:
        """See Flowers."""
        raise AssertionError


@pytest.mark.parametrize("goal", [None, "max"])
def test_a_wrong_metric_of_early_stopping_is_found_before_anything_slow(
    goal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(DataParallel, "build", build)
    input = (Unread if goal is None else Flowers).Params(batch_size=4)
    job = job_of(input, 2, tmp_path, io.StringIO())
    job.tree.set(eval_inputs={"dev": HeldOut.Params()}).set({"run.early_stopping.goal": goal})
    job.tree.set_text("run.early_stopping.metric", "val_acuracy")
    job.tree.run.early_stopping.patience = 2
    said = r"^run.early_stopping.metric \(--set\) is 'val_acuracy'.*accuracy.*did you mean accuracy"
    with pytest.raises(ValueError, match=said if goal else r"\(--set\) is .*did you mean accuracy"):
        modes.train(job)


class Picky(Linear):
    """Takes only batches of some size."""

    class Params(Linear.Params):
        """Params of Picky."""

        size: int = param("Number of examples.", default=4)

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        """See Linear."""
        if x.shape[0] != self.params.size:
            raise ValueError(f"{x.shape[0]} is no batch of {self.params.size}")
        return super().fprop(theta, x, ctx)


def test_an_error_of_a_layer_is_no_warning_as_well(tmp_path: Path) -> None:
    output = io.StringIO()
    job = job_of(Flowers.Params(batch_size=4), 2, tmp_path, output)
    job.tree.task.model = Picky.Params(input_dim=4, output_dim=3, size=5)
    with pytest.raises(ValueError, match="4 is no batch of 5"):
        modes.train(job)
    assert "is no batch of" not in output.getvalue()


def test_a_task_that_could_not_be_checked_is_a_warning_after_the_first_step(tmp_path: Path) -> None:
    output = io.StringIO()
    job = job_of(Flowers.Params(batch_size=4), 2, tmp_path, output)
    job.tree.task.model = Picky.Params(input_dim=4, output_dim=3)
    job.tree.run.decode_at_end = False
    assert modes.train(job) == ExitCode.OK
    warning = "warning: Classification could not be checked on a few examples (is its loss a sum, "
    assert output.getvalue().count(warning) == 1
    assert "ValueError: 3 is no batch of 4" in output.getvalue()


class Weighted(Classification):
    """Multiplies its loss by a number."""

    class Params(Classification.Params):
        """Params of Weighted."""

        factor: float = param("Weight of the loss.", default=1.0)
        note: str = param("A text that nothing reads.", default="")

    def sums(self, logits: Any, batch: Any) -> LossSums:
        """See Classification."""
        sums = super().sums(logits, batch)
        return LossSums(self.params.factor * sums.loss_sum, sums.metrics)


def test_the_best_checkpoint_starts_again_if_the_definition_of_its_metric_changes(
    tmp_path: Path,
) -> None:
    def train(steps: int, **settings: Any) -> tuple[str, int | None]:
        output = io.StringIO()
        job = job_of(Flowers.Params(batch_size=4), steps, tmp_path, output)
        job.tree.task = Weighted.Params(model=job.tree.task.model, num_classes=3)
        job.tree.eval_inputs = {"dev": HeldOut.Params()}
        job.tree.set(settings)
        job.tree.run.set({"eval_every_steps": 2, "decode_at_end": False})
        assert modes.train(job) == ExitCode.OK
        checkpoints = job.checkpoints()
        checkpoints.prepare()
        checkpoints.close()
        return output.getvalue(), checkpoints.best_step()

    train(4)
    output, best = train(6, **{"task.note": "x", "task.model.dropout_rate": 0.05})
    assert best == 6 and "definition" not in output and "meaning" not in output
    output, best = train(8, **{"task.factor": 50.0})  # smaller than before by no step
    text = "warning: the definition of dev/loss changed after step 6: the best checkpoint and the "
    assert output.count(text) == 1 and "changed since then: task.factor : 1.0 -> 50.0" in output
    assert best == 8
    output, best = train(10, **{"task.factor": 50.0})
    assert best == 10 and "definition" not in output


def test_metrics_that_cannot_be_computed_are_said_to_be_unknown() -> None:
    task = Weighted.Params(model=classifier(3).model, num_classes=3, factor=2.0).instantiate()
    inputs = {"dev": HeldOut.Params().instantiate(train=Flowers.Params(batch_size=4))}

    def find(metrics: set[str], weights: Any, **before: Any) -> metric_changes.MetricChanges:
        text = task.params.copy().set(before).to_text()
        return metric_changes.find(text, task, weights, inputs, metrics)

    weights = {path: tf.ones(spec.shape) for path, spec in task.specs().items()}
    found = find({"dev/loss", "dev/accuracy", "dev/bleu"}, weights, factor=1.0)
    assert (found.changed, found.unknown) == (("dev/loss",), ("dev/bleu",))
    assert "if they change what dev/bleu means, the best checkpoint" in found.text(3)
    assert find({"dev/loss"}, None, factor=1.0).unknown == ("dev/loss",)  # too large to try
    for same in ({}, {"model.dropout_rate": 0.5}):
        found = find({"dev/loss", "dev/bleu"}, weights, **same)
        assert found == metric_changes.MetricChanges() and found.text(3) == ""


@pytest.mark.parametrize(("now", "differs"), [(2.00005, False), (2.001, True), (-2.0, True)])
def test_figures_of_another_order_of_operations_are_the_same(now: float, differs: bool) -> None:
    assert metric_changes._differ(2.0, now) == differs


def test_memory_that_is_missing_at_the_end_is_not_missing_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(run_messages, "conclude", exhausted)
    job = job_of(Flowers.Params(batch_size=4), 2, tmp_path, io.StringIO())
    with pytest.raises(OutOfMemoryError, match=r"^out of memory after step 2"):
        modes.train(job)


def test_the_time_of_decoding_at_the_end_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any) -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.02:
            pass

    monkeypatch.setattr(modes.task_results, "decode", decode)
    assert modes.train(job_of(Flowers.Params(batch_size=4), 2, tmp_path, io.StringIO())) == 0
    files = (tmp_path / name for name in ("metrics.jsonl", "progress.jsonl"))
    last, end = (json.loads(file.read_text().splitlines()[-1]) for file in files)
    assert last["seconds"]["decoding"] == 0.0 and end["seconds"]["decoding"] >= 0.02
    assert end["step"] == 2


def test_the_time_until_a_signal_ends_the_run_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = modes.rescue.run

    def stopped(*given: Any) -> Any:
        outcome, begin = run(*given), time.perf_counter()
        while time.perf_counter() - begin < 0.02:
            pass
        return dataclasses.replace(outcome, stopped_by=signal.SIGINT)

    monkeypatch.setattr(modes.rescue, "run", stopped)
    modes.train(job_of(Flowers.Params(batch_size=4), 2, tmp_path, io.StringIO()))
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()
    saved, end = (sum(json.loads(line)["seconds"].values()) for line in lines[-2:])
    assert end >= saved + 0.02


def test_a_run_that_is_past_its_last_step_stays_as_it_is(tmp_path: Path) -> None:
    tree, output = Tiny().tree(), io.StringIO()
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"))
    checkpoints.prepare()
    description = Description(step=30, model="a.B", params=tree.to_text())
    checkpoints.save(lambda: of_arrays({"weights/w": np.ones(3)}), description)
    checkpoints.wait()
    checkpoints.close()
    registered, tree.run.steps = tree.copy(), 25
    job = Job(
        model="a.B", tree=tree, registered=registered, logdir=Logdir(str(tmp_path)),
        console=PlainConsole(output),
    )  # fmt: skip
    assert modes.train(job) == ExitCode.OK
    assert "is already at step 30, and run.steps is 25" in output.getvalue()
    assert len(output.getvalue().splitlines()) == 1
    assert sorted(set(os.listdir(tmp_path)) - {".lock"}) == ["checkpoints"]


def test_a_setting_that_was_not_repeated_is_a_warning_if_the_model_was_given(
    tmp_path: Path,
) -> None:
    registered, logdir = Tiny().tree(), Logdir(str(tmp_path))
    before = registered.copy().set_text("run.early_stopping.patience", "2")
    before.set_text("run.eval_every_steps", "20").set({"run.log_every_steps": 7})  # in code
    logdir.write_params("a.B", before, registered)
    checkpoint: Any = SimpleNamespace(
        path="step_9", step=9, description=SimpleNamespace(params=before.to_text())
    )
    for words, count in ((["--model=a.B"], 1), (["--logdir=x"], 0)):
        output = io.StringIO()
        job = Job(
            model="a.B", tree=registered.copy(), registered=registered, logdir=logdir,
            console=PlainConsole(output), command=["tekso-trainer", *words],
        )  # fmt: skip
        run_messages.introduce(job, checkpoint)
        text = "warning: this command does not repeat 2 settings of the run (run.eval_every"
        assert output.getvalue().count(text) == count
        assert "changed since then: run.log_every_steps : 7 -> " in output.getvalue()
