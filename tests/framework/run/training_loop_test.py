"""The training loop on a program of a few NumPy lines: timetable, resuming, signals, trouble.

Run as a script, this file leaves in a folder what runs that were killed leave: `killed_runs`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework import files, watchdog
from tekso.framework.execution.shards import Shard, of_arrays
from tekso.framework.execution.state import Stored, checked_state
from tekso.framework.exit_codes import ExitCode
from tekso.framework.learner import NonFiniteStepsError
from tekso.framework.run import rollback, tensor_files, time_use
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints, Description
from tekso.framework.run.early_stopping import EarlyStoppingRule
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report import curves
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.run.report.report import Report
from tekso.framework.run.timetable import Timetable
from tekso.framework.run.training_loop import Outcome, TrainingLoop
from tekso.framework.task import Scored
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


PICTURE = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 5, 3)


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


@pytest.fixture(scope="module", autouse=True)
def no_drawing() -> Iterator[None]:
    """Curves are drawn in a test of their own: here they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda *args, **options: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 20 steps that nothing interrupts."""
    run = Run(tmp_path_factory.mktemp("whole"))
    run.train()
    return run


def test_a_step_is_shown_once_when_the_process_is_warm_or_at_the_end(tmp_path: Path) -> None:
    for steps, shown in ((9, [4]), (11, [10]), (11, [])):  # the second goes on after 9 steps
        run = Run(tmp_path)
        now: list[int] = []
        seen: list[int] = []
        take = functools.partial(_copy_last, now, seen)
        run.train(steps, program=FakeProgram(at_step=now.append), show_step=take)
        assert seen == shown


def _copy_last(source: list[int], target: list[int]) -> None:
    target.append(source[-1])


def test_what_decoding_shows_joins_the_evaluation_and_chooses_the_best(tmp_path: Path) -> None:
    run, asked = Run(tmp_path), []

    def score(name: str, is_last: bool, stopped: Any) -> Scored:
        asked.append((name, is_last, stopped()))
        figure = {1: 3.0, 2: 8.0, 3: 5.0}[len(asked)]
        return Scored({"bleu": figure}, f"after {len(asked)}\n", {"attention": PICTURE})

    run.train(15, metric="dev/bleu", goal="max", keep_best=1, keep_last=1, score=score)
    assert asked == [("dev", False, False), ("dev", False, False), ("dev", True, False)]
    assert [record["bleu"] for record in run.records("dev")] == [3.0, 8.0, 5.0]
    assert run.saved() == [10, 15]  # the best and the last
    assert "BLEU 8.00" in run.output.getvalue()
    folder = tmp_path / "decoded" / "dev"
    texts = {path.name: path.read_text() for path in folder.glob("*.txt")}
    assert texts == {f"step_{5 * n:09d}.txt": f"after {n}\n" for n in (1, 2, 3)}
    assert (folder / "attention.png").read_bytes() == PICTURE


def test_a_task_without_scores_leaves_no_folder(whole: Run) -> None:
    assert not (whole.path / "decoded").exists()


def test_a_run_logs_evaluates_and_saves_as_the_timetable_says(whole: Run) -> None:
    assert list(whole.losses()) == list(range(1, 21))
    assert list(whole.losses("dev")) == [5, 10, 15, 20]
    assert whole.saved() == [4, 8, 12, 16, 20]
    assert all(value == value for value in whole.losses().values())


def test_log_every_reports_the_first_the_last_and_every_so_many(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(11, log_every=4, eval_every=0, checkpoint_every=0)
    assert list(run.losses()) == [1, 4, 8, 11]
    assert list(run.losses("dev")) == [11] and run.saved() == [11]


def test_several_steps_in_a_call_are_the_same_run(tmp_path: Path, whole: Run) -> None:
    run = Run(tmp_path)
    run.train(steps_per_call=3, log_every=2)
    assert run.losses() == {step: whole.losses()[step] for step in (1, *range(2, 21, 2))}
    assert run.losses("dev") == whole.losses("dev") and run.saved() == whole.saved()
    # Evaluations after every 5 steps, checkpoints after every 4: calls end there.
    assert run.program.calls == [1, 3, 1, 3, 1, 1, 1, 1, 3, 1, 3, 1]


def test_batches_of_another_shape_are_in_another_call(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[Any]:
        for step, batch in enumerate(train_batches(start), start):
            yield {"x": batch["x"][: 3 if step in (4, 10) else 5]}

    run, alone = Run(tmp_path / "a"), Run(tmp_path / "b")
    for one, steps_per_call in ((run, 2), (alone, 1)):
        one.path.mkdir()
        one.train(
            12, batches=batches, eval_every=0, checkpoint_every=0, steps_per_call=steps_per_call
        )
    assert run.losses() == alone.losses()
    assert run.program.calls == [1, 2, 1, 1, 2, 2, 1, 1, 1]
    assert "first with 2 steps a call, batches of 5 x 3" in run.output.getvalue()


def test_the_logged_loss_is_that_of_the_step_in_full_precision(whole: Run) -> None:
    program = FakeProgram()
    program.initialize()
    batches = train_batches(0)
    for step, loss in whole.losses().items():
        assert program.train_step(next(batches), step - 1)["loss"] == loss


def test_an_evaluation_weighs_every_example_once(whole: Run) -> None:
    program = FakeProgram()
    program.initialize()
    batches = train_batches(0)
    for step in range(5):
        program.train_step(next(batches), step)
    x = np.concatenate([batch["x"] for batch in eval_batches(0)])[:3]  # the last one is padding
    (record,) = [r for r in whole.records("dev") if r["step"] == 5]
    assert record["loss"] == pytest.approx(np.sum((x - program.w) ** 2) / 3, rel=1e-12)
    assert record["error"] == pytest.approx(np.abs(x - program.w).sum() / 3, rel=1e-12)


# --- early stopping ---

WORSE = {3: 5.0, 6: 4.0, 9: 4.5, 12: 4.0, 15: 4.2, 18: 1.0}
"""A metric by step; with a patience of 3, training ends after step 15."""
RULE = EarlyStoppingRule("dev/quality", "min", patience=3)


def train_with_quality(
    run: Run,
    steps: int = 21,
    rule: EarlyStoppingRule = RULE,
    values: Mapping[int, float] = WORSE,
    **options: Any,
) -> Outcome:
    """Trains with evaluations that report values by step."""

    def score(name: str, is_last: bool, stopped: Any) -> Scored:
        return Scored({"quality": values[len(run.records("dev")) * 3 + 3]}, "", {})

    return run.train(
        steps, eval_every=3, checkpoint_every=4, score=score, early_stopping=rule, **options
    )


def test_training_ends_early_and_saves_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    outcome = train_with_quality(run)
    assert (outcome.step, outcome.stopped_by) == (15, None)
    assert outcome.ended_early == (
        "none of the last 3 evaluations of dev/quality improved the best 4.0000 at step 6"
    )
    assert run.saved() == [4, 8, 12, 15] and list(run.losses("dev")) == [3, 6, 9, 12, 15]
    again = train_with_quality(run)  # a finished run does not go on
    assert (again.first_step, again.step, again.ended_early) == (15, 15, outcome.ended_early)
    longer = EarlyStoppingRule("dev/quality", "min", patience=4)
    assert train_with_quality(run, steps=18, rule=longer).step == 18


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    train_with_quality(run, steps=12)
    for step in (9, 12):  # as if it had been killed after step 8 was saved
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
    assert (outcome := train_with_quality(run)).step == 15 and outcome.first_step == 8


def test_evaluations_on_other_data_neither_end_the_run_nor_are_the_best(tmp_path: Path) -> None:
    run, values = Run(tmp_path), {3: 0.5, 6: 0.1, 9: 4.5, 12: 4.0, 15: 4.2, 18: 4.1, 21: 4.3}
    (tmp_path / "metrics.jsonl").touch()
    options = {"values": values, "keep_last": 1, "keep_best": 1, "metric": "dev/quality"}
    train_with_quality(run, 6, **options)
    assert run.checkpoints.best_step() == 6 and "warning" not in run.output.getvalue()
    outcome = train_with_quality(run, 16, **options, eval_data="b")
    assert (outcome.step, outcome.ended_early) == (16, "") and run.saved() == [12, 16]
    assert run.output.getvalue().count("warning: the data of dev changed after step 6: ") == 1
    # A later process, and one that only reads, know it from the checkpoints.
    outcome = train_with_quality(run, **options, eval_data="b")
    assert outcome.ended_early.endswith("improved the best 4.0000 at step 12")
    assert run.checkpoints.best_step() == 12 and outcome.step == 18
    assert Checkpoints(run.checkpoints.directory).best("dev/quality", "min").step == 12
    assert run.output.getvalue().count("changed after step 6") == 1


def test_a_metric_that_no_evaluation_reports_is_refused_after_the_step_is_saved(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    rule = EarlyStoppingRule("dev/acuracy", "max", patience=3)
    with pytest.raises(ValueError, match=r"metric is 'acuracy', .* only dev/loss, dev/error"):
        run.train(eval_every=3, checkpoint_every=0, early_stopping=rule)
    assert run.saved() == [3]


# --- killed, and started again ---

WRITING = {"tensors": 4, "description": 4, "name": 4, "surplus": 8}
"""What the checkpoint of step 8 is about to get when a run is killed: newest complete one."""
KILLED = {**{str(step): step // 4 * 4 for step in range(20)}, **WRITING}
"""When a run was killed: the steps of its newest complete checkpoint; 0 if it has none."""


def kill_this_process() -> None:
    """Nothing is done after it: no `finally`, no `except`, nothing at exit."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run: Run, moment: str) -> None:
    """Trains until a step begins or, if `moment` is one of WRITING, to that point of a write."""
    if moment in WRITING:
        places = {
            "tensors": (tensor_files, "write"),
            "description": (files, "write_atomically"),
            "name": (files, "rename"),
            "surplus": (Checkpoints, "_remove_surplus"),
        }
        owner, name = places[moment]
        act, calls = getattr(owner, name), iter(range(3))

        def kill_at_second_call(*args: Any, **options: Any) -> Any:
            if next(calls) == 1:  # of the second checkpoint; there is one call for each
                kill_this_process()
            return act(*args, **options)

        setattr(owner, name, kill_at_second_call)
        run.train()

    def at_step(now: int) -> None:
        if now == int(moment):
            run.checkpoints.wait()  # so that it is known which is the newest complete one
            kill_this_process()

    run.train(program=FakeProgram(at_step=at_step))


def leave_killed_runs(folder: Path) -> None:
    """Forks before TensorFlow's runtime has started: no thread is lost in the child."""
    for moment in KILLED:
        child = os.fork()
        if not child:
            try:
                train_and_be_killed(Run(folder / moment), moment)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"the run to be killed at {moment} ended by itself")


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run for each moment of KILLED."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def killed_run(killed_runs: Path, tmp_path: Path) -> Callable[[str], Run]:
    """Returns what a run that was killed at a moment left."""
    return lambda moment: Run(Path(shutil.copytree(killed_runs / moment, tmp_path / moment)))


def test_every_second_is_attributed_and_the_work_after_a_checkpoint_is_lost(
    tmp_path: Path,
) -> None:
    run, ticks = Run(tmp_path), itertools.count()  # a second passes whenever the time is asked for

    def fail(step: int) -> None:
        if step == 11:
            raise RuntimeError("as if it had been killed")

    use = time_use.TimeUse(clock=lambda: float(next(ticks)))
    with pytest.raises(RuntimeError):
        run.train(program=FakeProgram(at_step=fail), time_use=use)
    before = run.records()
    marks = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [mark["step"] for mark in marks] == [4, 8]
    kept = marks[-1]["seconds"]
    assert before[-1]["step"] == 11 and list(kept) == list(time_use.ACTIVITIES)
    assert sum(use.seconds().values()) == next(ticks) - 1

    use = time_use.TimeUse(clock=lambda: float(next(ticks)))
    begin = next(ticks) - 1
    run.train(time_use=use)
    last = run.records()[-1]["seconds"]
    lost = sum(before[-1]["seconds"].values()) - sum(kept.values())
    assert last["lost"] == lost > 0
    spent = use.seconds()
    assert sum(spent.values()) == sum(before[-1]["seconds"].values()) + next(ticks) - 1 - begin
    assert all(last[name] > kept[name] for name in ("start", "step", "compile", "evaluation"))
    assert all(spent[name] > 0 for name in ("input", "checkpoint", "other"))


def test_units_seen_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[dict[str, np.ndarray]]:
        for step in range(start, 10**6):
            yield {"x": np.ones((2 + step % 5, 3))}

    def fail(step: int) -> None:
        if step == 11:
            raise RuntimeError("as if it had been killed")

    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    whole.train(log_every=3, batches=batches, keep_best=0)
    with pytest.raises(RuntimeError):
        killed.train(log_every=3, batches=batches, keep_best=0, program=FakeProgram(at_step=fail))
    killed.train(log_every=3, batches=batches, keep_best=0, steps_per_call=3)
    seen = {r["step"]: r["examples_seen"] for r in killed.records("train")}
    assert seen == {n: sum(2 + i % 5 for i in range(n)) for n in (1, 3, 6, 9, 12, 15, 18, 20)}
    assert seen == {r["step"]: r["examples_seen"] for r in whole.records("train")}


@pytest.mark.parametrize("moment", KILLED)
def test_killed_at_any_moment_goes_on_from_the_newest_complete_checkpoint_as_the_same_run(
    killed_run: Callable[[str], Run], whole: Run, moment: str
) -> None:
    run = killed_run(moment)
    trained: list[int] = []
    outcome = run.train(program=FakeProgram(at_step=trained.append))
    assert outcome.first_step == KILLED[moment] and outcome.step == 20
    assert trained == list(range(KILLED[moment], 20))
    assert run.losses() == whole.losses() and run.losses("dev") == whole.losses("dev")
    assert run.saved() == whole.saved() and run.warnings == []
    np.testing.assert_array_equal(run.program.w, whole.program.w)
    steps = [record["step"] for record in run.records()]
    assert steps == sorted(steps)


def test_a_killed_run_has_logged_every_step_that_was_done(
    killed_run: Callable[[str], Run], whole: Run
) -> None:
    run = killed_run("18")
    assert run.losses() == {step: whole.losses()[step] for step in range(1, 19)}
    assert run.losses("dev") == {step: whole.losses("dev")[step] for step in (5, 10, 15)}


def test_killed_after_a_save_and_before_the_end_of_the_run_evaluates_what_is_missing(
    tmp_path: Path, whole: Run
) -> None:
    run = Run(tmp_path)
    run.train()
    log = tmp_path / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"dev"' not in line]
    log.write_text("\n".join(lines) + "\n")
    outcome = run.train()  # from the last step: nothing to train
    assert outcome.first_step == 20
    assert run.losses("dev") == {20: whole.losses("dev")[20]}
    assert outcome.evaluations["dev"]["loss"] == whole.losses("dev")[20]
    assert run.warnings == []


def test_a_finished_run_changes_nothing_and_more_steps_go_on(tmp_path: Path, whole: Run) -> None:
    run = Run(tmp_path)
    run.train(10)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    outcome = run.train(10)
    assert (outcome.first_step, outcome.step) == (10, 10)
    assert outcome.evaluations["dev"]["loss"] == run.losses("dev")[10]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run.train(20)
    assert run.losses() == whole.losses()


def test_a_torn_checkpoint_is_told_and_the_one_before_is_gone_on_from(
    killed_run: Callable[[str], Run], whole: Run
) -> None:
    run = killed_run("10")
    torn = run.path / "checkpoints" / "step_00000008" / "tensors.data-00000-of-00001"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert run.train().first_step == 4
    assert "step_00000008" in run.warnings[0] and "damaged_step_00000008.1" in run.warnings[0]
    assert run.losses() == whole.losses() and run.losses("dev") == whole.losses("dev")


def test_changed_bytes_are_found_when_they_are_restored_and_the_one_before_is_gone_on_from(
    killed_run: Callable[[str], Run], whole: Run
) -> None:
    run = killed_run("13")
    for step in (12, 8):
        changed = run.path / "checkpoints" / f"step_{step:08d}" / "tensors.data-00000-of-00001"
        content = bytearray(changed.read_bytes())
        content[5] ^= 1
        changed.write_bytes(content)
    assert run.train().first_step == 4
    for step, warning in zip((12, 8), run.warnings, strict=True):
        assert f"damaged checkpoint {run.path}/checkpoints/step_{step:08d}" in warning
        assert "weights/w cannot be read: the bytes of tensors.data-00000-of-00001" in warning
        assert f"renamed to {run.path}/checkpoints/damaged_step_{step:08d}.1" in warning
    assert run.losses() == whole.losses() and run.losses("dev") == whole.losses("dev")


def test_changed_bytes_in_all_checkpoints_are_an_error_and_no_new_run(
    killed_run: Callable[[str], Run],
) -> None:
    run = killed_run("5")
    (changed,) = (run.path / "checkpoints").glob("step_*/tensors.data-*")
    changed.write_bytes(bytes(len(changed.read_bytes())))
    for _ in range(2):  # also when the command is repeated
        with pytest.raises(CheckpointError, match=r"are damaged.*weights/w.*Nothing was deleted"):
            run.train()
        assert changed.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_the_next_start_goes_on(
    tmp_path: Path, whole: Run, number: signal.Signals
) -> None:
    def at_step(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    run = Run(tmp_path)
    outcome = run.train(program=FakeProgram(at_step=at_step))
    assert (outcome.step, outcome.stopped_by) == (7, number)
    assert run.saved() == [4, 7] and signal.getsignal(number) == before
    assert run.train().first_step == 7
    assert run.losses() == whole.losses() and run.losses("dev") == whole.losses("dev")


def test_a_signal_in_an_evaluation_saves_at_once_and_evaluates_later(
    tmp_path: Path, whole: Run
) -> None:
    run = Run(tmp_path)

    def interrupted(start: int) -> Iterator[Any]:
        for batch in eval_batches(start):
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    outcome = run.train(evaluations={"dev": interrupted})
    assert outcome.step == 5 and run.saved() == [4, 5] and run.losses("dev") == {}
    run.train()
    assert run.losses("dev") == whole.losses("dev")
    assert [r["step"] for r in run.records()][4:7] == [5, 5, 6]


def test_the_best_evaluation_is_saved_whenever_it_comes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(40, checkpoint_every=0, eval_every=3, keep_last=1, keep_best=1)
    losses = run.losses("dev")
    best = min(losses, key=losses.__getitem__)
    assert run.saved() == sorted({best, 40})
    assert "best so far" in run.output.getvalue()


def test_a_checkpoint_tells_its_metrics_and_where_the_input_stands(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(10, checkpoint_every=5)
    path = tmp_path / "checkpoints" / "step_00000005" / "checkpoint.json"
    told = json.loads(path.read_text())
    assert told["input"] == {"seed": 3, "position": 5, "eval_data": {"dev": "a"}}
    assert told["metrics"]["dev/loss"] == run.losses("dev")[5]


def test_another_weight_table_is_an_error_that_names_the_weights(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(4, checkpoint_every=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"step_00000004.*weights/w is \[3\], must be \[2\]"):
        run.train(8, program=FakeProgram(dim=2))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_trouble_of_the_learner_stops_the_run_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[Any]:
        for step, batch in enumerate(train_batches(start), start):
            yield batch if step < 6 else {"x": np.full((5, 3), np.inf)}

    run = Run(tmp_path)
    with pytest.raises(NonFiniteStepsError):
        run.train(batches=batches)
    assert run.saved() == [4]


def test_an_input_that_ends_early_is_named_by_its_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ends before step 3"):
        Run(tmp_path).train(batches=lambda start: iter(list(next_batches(3))))


def next_batches(count: int) -> Iterator[Any]:
    for _, batch in zip(range(count), train_batches(0), strict=False):
        yield batch


def test_a_batch_that_the_task_refuses_reaches_no_device(tmp_path: Path) -> None:
    def batches(start: int, bad: int, size: int = 1) -> Iterator[dict[str, np.ndarray]]:
        for step in range(start, 5):
            x = np.full((size, 3), -np.inf if step == bad else 1.0)
            yield {"x": x, "weights": np.ones(size)}

    seen: list[int] = []
    run = Run(tmp_path / "train")
    with pytest.raises(ValueError, match=r"^input\.batch\(3\): x is too large"):
        run.train(batches=functools.partial(batches, bad=3), program=FakeProgram(3, seen.append))
    assert seen == [0, 1, 2]
    run = Run(tmp_path / "eval")
    with pytest.raises(ValueError, match=r"^eval_inputs\.dev\.batch\(1\): x is too large"):
        run.train(evaluations={"dev": functools.partial(batches, bad=1)})


def test_an_empty_evaluation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval_inputs.dev has no example"):
        Run(tmp_path).train(evaluations={"dev": lambda start: iter(())})


def test_no_steps_evaluate_and_save_the_first_state(tmp_path: Path) -> None:
    run = Run(tmp_path)
    outcome = run.train(0)
    assert outcome.step == 0 and run.saved() == [0] and list(run.losses("dev")) == [0]


def test_lines_have_no_escape_codes_and_tell_the_time_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(20, log_every=10)
    lines = run.output.getvalue().splitlines()
    assert all("\x1b" not in line and len(line) <= 100 for line in lines)
    assert lines[0].startswith("step  1/20") and "left" not in lines[0]
    (tenth,) = [line for line in lines if line.startswith("step 10/20")]
    assert "ex/s" in tenth and "left" in tenth and "wait" in tenth


def test_input_that_never_comes_ends_the_run_after_its_state_is_saved(tmp_path: Path) -> None:
    def stalled(start: int) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(train_batches(start), start):
            if step == 7:  # as the watchdog interrupts it
                raise watchdog.StalledError("waited too long for the batch")
            yield batch

    run, alone = Run(tmp_path / "stalled"), Run(tmp_path / "alone")
    with pytest.raises(watchdog.StalledError, match=r"waited too long.*step 7 is saved") as error:
        run.train(batches=stalled)
    assert error.value.exit_code == ExitCode.STALLED
    assert run.checkpoints.steps()[-1] == 7
    run.train()
    alone.train()
    np.testing.assert_array_equal(run.program.w, alone.program.w)


if __name__ == "__main__":
    curves.draw = lambda *args, **options: None
    leave_killed_runs(Path(sys.argv[1]))


def test_a_later_compilation_is_reported_and_not_timed(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[dict[str, np.ndarray]]:
        for step in range(start, 8):
            yield {"x": np.ones((5 + step // 3, 3))}

    def slow(step: int) -> None:
        if step in (0, 3, 6):
            done = time.perf_counter() + 0.3
            while time.perf_counter() < done:
                pass

    run = Run(tmp_path)
    run.train(8, batches=batches, program=FakeProgram(at_step=slow))
    lines = [line for line in run.output.getvalue().splitlines() if "is the first with" in line]
    assert [line.split(":")[0].strip() for line in lines] == [
        "step 4 is the first with batches of 6 x 3",
        "step 7 is the first with batches of 7 x 3",
    ]
    assert all(float(line.split(":")[1].strip().removesuffix("s")) >= 0.3 for line in lines)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    speeds = {r["step"]: r.get("examples_per_second") for r in records if r["split"] == "train"}
    assert [step for step, speed in speeds.items() if speed is None] == [1, 4, 7]


# --- rolled back ---


def poisoned_batches(*bad: int) -> Any:
    def batches(start: int) -> Iterator[Any]:
        for number, batch in enumerate(train_batches(start), start):
            yield {"x": np.full((5, 3), np.inf)} if number in bad else batch

    return batches


class CountingProgram(FakeProgram):
    """Skips steps that are not finite and counts them, as a learner does."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(at_step=at_step)
        self.skipped = 0.0

    def specs(self) -> dict[str, WeightSpec]:
        return {**super().specs(), "learner/n": WeightSpec("n", (1,), (None,), init=None)}  # type: ignore[arg-type]

    def initialize(self) -> None:
        super().initialize()
        self.skipped = 0.0

    def shards(self) -> Iterator[Shard]:
        return of_arrays({"weights/w": self.w.copy(), "learner/n": np.array([self.skipped])})

    def restore(self, read: Callable[[str], Stored], keys: Any) -> None:
        super().restore(read, keys)
        self.skipped = float(read("learner/n")[(slice(0, 1),)][0])

    def train_step(self, batch: Any, step: int) -> dict[str, Any]:
        before = self.w
        metrics = super().train_step(batch, step)
        is_bad = not np.isfinite(metrics["loss"])
        if is_bad:
            self.w = before
        self.skipped = self.skipped + 1 if is_bad else 0.0
        return {**metrics, "nonfinite_consecutive": self.skipped, "nonfinite_total": 0}


class CountingLearner:
    def check(self, metrics: Any) -> None:
        if metrics["nonfinite_consecutive"] >= 3:
            raise NonFiniteStepsError("3 steps were not finite.")


def rolled_back(run: Run, bad: Sequence[int], **options: Any) -> Outcome:
    options = {"program": CountingProgram(), "learner": CountingLearner(), **options}
    return run.train(batches=poisoned_batches(*bad), max_rollbacks=2, **options)


def expected_weights(batches: Sequence[int]) -> np.ndarray:
    """Returns the weights after training on batches by number."""
    program = FakeProgram()
    program.initialize()
    for step, number in enumerate(batches):
        program.train_step(next(train_batches(number)), step)
    return program.w


@pytest.mark.parametrize("first", [8, 10])  # right after a checkpoint, and later
def test_a_run_is_rolled_back_and_skips_the_batches_of_a_series(tmp_path: Path, first: int) -> None:
    run = Run(tmp_path)
    bad = range(first, first + 3)
    assert rolled_back(run, bad).step == 20
    np.testing.assert_array_equal(
        run.program.w, expected_weights([*range(first), *range(first + 3, 23)])
    )
    assert list(run.losses()) == list(range(1, 21)) and run.saved() == [4, 8, 12, 16, 20]
    described = run.checkpoints.open("20").description.input
    assert described == {
        "seed": 3,
        "eval_data": {"dev": "a"},
        "position": 23,
        "skipped_batches": [[first, first, first + 3]],
        "rollbacks": 1,
    }
    assert f"rolled back to step 8 (rollback 1); from step {first + 1} on" in run.output.getvalue()


def test_a_single_step_that_is_not_finite_is_no_reason_to_roll_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert rolled_back(run, [5, 6, 9]).step == 20
    assert run.checkpoints.open("20").description.input == {
        "seed": 3,
        "position": 20,
        "eval_data": {"dev": "a"},
    }


class FakeIncidents:
    """Takes incidents: the steps before each, and whether the state before it is still there."""

    last = None

    def __init__(self) -> None:
        self.found: list[tuple[int, bool]] = []

    def record(self, step: int, metrics: Any, description: Any, program: Any) -> None:
        assert not np.isfinite(metrics["loss"]) and description.input["seed"] == 3
        self.found.append((step, program is not None))


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_first_step_of_every_series_is_an_incident(tmp_path: Path, steps_per_call: int) -> None:
    incidents = FakeIncidents()
    options = {"incidents": incidents, "steps_per_call": steps_per_call, "eval_every": 0}
    rolled_back(Run(tmp_path), [2, 5, 6, 15], **options)
    # Step 3 was applied before 2 was checked; 15 is checked before its checkpoint is saved.
    assert incidents.found == [(2, False), (5, True), (15, True)]


def test_when_new_batches_are_not_finite_either_the_run_goes_back_further(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert rolled_back(run, range(10, 16)).step == 20  # the second series is the same step again
    described = run.checkpoints.open("20").description.input
    assert described["skipped_batches"] == [[8, 8, 16]] and described["rollbacks"] == 2
    np.testing.assert_array_equal(run.program.w, expected_weights([*range(8), *range(16, 28)]))


def test_after_the_last_rollback_the_run_ends_with_its_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(NonFiniteStepsError, match=r"rolled back 2 times, .*max_rollbacks"):
        rolled_back(run, range(10, 99))
    with pytest.raises(NonFiniteStepsError, match="No checkpoint was saved before"):
        rolled_back(Run(tmp_path / "new"), [1, 2, 3])


@pytest.mark.parametrize("moment", ["renamed", "recorded", 8, 9, 11, 13, 20])
def test_a_run_that_is_killed_around_a_rollback_goes_on_as_if_it_had_not_been(
    tmp_path: Path, moment: str | int
) -> None:
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    bad = [10, 11, 12, 15, 16, 17]
    rolled_back(whole, bad)
    wanted = whole.program.w

    class Killed(BaseException):
        pass

    calls: list[int] = []

    def kill(*args: Any, **options: Any) -> None:
        raise Killed

    def kill_in_step(step: int) -> None:
        calls.append(step)
        if step == moment and calls.count(step) == (2 if step < 12 else 1):
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        if moment == "renamed":
            patch.setattr(rollback, "_record", kill)
        if moment == "recorded":
            patch.setattr(Checkpoints, "resume", _second_time(Checkpoints.resume, kill))
        with contextlib.suppress(Killed):
            rolled_back(run, bad, program=CountingProgram(at_step=kill_in_step))
    rolled_back(run, bad)
    np.testing.assert_array_equal(run.program.w, wanted)
    assert run.losses() == whole.losses() and run.saved() == whole.saved()
    found, expected = (r.checkpoints.open("20").description.input for r in (run, whole))
    assert found == expected


def _second_time(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return first(*args, **options) if len(calls) == 1 else then()

    return call
