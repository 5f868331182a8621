"""A logdir that is removed, moved, replaced or made read-only while a run writes to it."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework import files
from tekso.framework.execution.shards import Shard, of_arrays
from tekso.framework.exit_codes import ExitCode, exit_code_of
from tekso.framework.experiment import Run, Tree
from tekso.framework.run import checkpoint_files, rescue, tensor_files
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.job import Job
from tekso.framework.run.logdir import Logdir, LogdirLostError
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.run.report.report import Report
from tekso.framework.run.training_loop import Timetable, TrainingLoop
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

MODEL, STEPS = "m.Model", 12


class Program:
    """w += 0.1 * (x - w); the loss is w."""

    def __init__(self, at_step: Callable[[int], None]) -> None:
        self.w, self.at_step = np.zeros(()), at_step

    def initialize(self) -> None:
        pass

    def shards(self) -> Iterator[Shard]:
        return of_arrays({"weights/w": self.w})

    def restore(self, read: Callable[[str], Any], keys: Any) -> None:
        self.w = np.asarray(read("weights/w")[()])

    def train_step(self, batch: Any, step: int) -> dict[str, Any]:
        self.at_step(step)
        self.w = self.w + 0.1 * (batch["x"].mean() - self.w)
        return {"loss": self.w, "nonfinite_consecutive": 0}

    def train_steps(self, batches: list[Any], step: int) -> list[dict[str, Any]]:
        return [self.train_step(batch, step + i) for i, batch in enumerate(batches)]


class FakeTask:
    def check_batch(self, what: str, batch: Any) -> None:
        pass

    def count(self, batch: Any) -> tuple[int, str]:
        return len(batch["x"]), "examples"

    def summarize(self, sums: Any) -> dict[str, float]:
        return {name: value / weight for name, (value, weight) in sums.items()}


class FakeLearner:
    def check(self, metrics: Any) -> None:
        pass


def batches(start: int) -> Iterator[dict[str, np.ndarray]]:
    for step in range(start, STEPS):
        yield {"x": np.full(2, step)}


def train(path: Path, at_step: Callable[[int], None] = lambda step: None) -> None:
    """Trains in a logdir as one process, and saves every 4 steps."""
    task = Classification.Params(model=Mlp.Params())
    tree: Any = Tree.Params(
        task=task, input=Run.Params(), learner=Run.Params(), execution=Run.Params()
    )
    console = PlainConsole(io.StringIO())
    job = Job(MODEL, tree, tree, Logdir(str(path)), console, command=["tekso-trainer"])
    job.logdir.claim(MODEL)
    checkpoints = job.checkpoints()
    checkpoints.prepare()
    report = Report(job.logdir, console, title=MODEL, steps=STEPS)
    loop = TrainingLoop(
        program=Program(at_step),  # type: ignore[arg-type]
        task=FakeTask(),  # type: ignore[arg-type]
        learner=FakeLearner(),  # type: ignore[arg-type]
        batches=batches,
        eval_batches={},
        timetable=Timetable(STEPS, log_every=1, eval_every=0, checkpoint_every=4),
        checkpoints=checkpoints,
        description=Description(step=0, model=MODEL, params="p"),
        report=report,
    )
    try:
        step = loop.restore(checkpoints.resume())
        job.logdir.write_params(MODEL, tree, tree)
        rescue.run(job, loop, report, step)
    finally:
        report.close()
        checkpoints.close()
        job.logdir.release()


def losses(path: Path) -> dict[int, float]:
    records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole")
    train(path)
    return losses(path)


def remove(path: Path) -> None:
    while path.exists():  # the run may write a file meanwhile
        shutil.rmtree(path, ignore_errors=True)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def empty(path: Path) -> None:
    """Does what `rm -r run/*` does: the hidden lock stays."""
    for inside in path.iterdir():
        if inside.name != ".lock":
            remove(inside) if inside.is_dir() else inside.unlink()


def replace(path: Path) -> None:
    """Removes the logdir; another trainer starts there at once."""
    remove(path)
    Logdir(str(path)).claim("m.Other")
    (path / "checkpoints").mkdir()


@pytest.mark.parametrize("lose", [remove, move, empty, replace])
def test_a_run_that_loses_its_logdir_ends_and_continues_elsewhere_as_the_same_run(
    tmp_path: Path, whole: dict[int, float], lose: Callable[[Path], None]
) -> None:
    path = tmp_path / "run"
    trained: list[int] = []

    def at_step(step: int) -> None:
        trained.append(step)
        if step == 5:
            while lose is replace and not list(path.glob("checkpoints/step_*[0-9]")):
                time.sleep(0.001)  # the other run would find the folder of the unfinished one
            lose(path)

    with pytest.raises(LogdirLostError) as caught:
        train(path, at_step)
    text = str(caught.value)
    # In an emptied logdir, a checkpoint may be half written in the background.
    names = {move: ["moved"], empty: ["run", "run.rescued"]}.get(lose, ["run.rescued"])
    assert trained[-1] == 5 and exit_code_of(caught.value) == ExitCode.LOGDIR_LOST
    assert text.startswith(str(path)) and len(text.splitlines()) == 1
    said = "the state of step 6 is saved in {}: to continue, repeat"
    (place,) = [tmp_path / name for name in names if said.format(tmp_path / name) in text]
    if lose is replace:  # nothing of this run is in the logdir of the other
        assert sorted(os.listdir(path)) == [".lock", "checkpoints"]
        assert os.listdir(path / "checkpoints") == []
    else:
        assert path.exists() == (lose is empty)
    train(place)
    assert losses(place) == whole


WRITES = [
    (files, "remove_folder"),
    (tensor_files, "write"),
    (tensor_files, "merge"),
    (checkpoint_files, "checksum"),
    (checkpoint_files, "versions"),
    (files, "sync"),
    (files, "rename"),
]


@pytest.mark.parametrize(("where", "name"), WRITES, ids=[name for _, name in WRITES])
def test_a_logdir_that_moves_while_a_checkpoint_is_written_is_not_created_again(
    tmp_path: Path,
    whole: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
) -> None:
    path, original, is_writing = tmp_path / "run", getattr(where, name), threading.Event()

    def moving(*args: Any, **kwargs: Any) -> Any:
        is_save = threading.current_thread() is not threading.main_thread()
        if is_save and not is_writing.is_set():
            move(path)
            is_writing.set()
        return original(*args, **kwargs)

    def at_step(step: int) -> None:
        if step == 5:
            is_writing.wait(60)

    monkeypatch.setattr(where, name, moving)
    with pytest.raises(LogdirLostError, match=r"moved to .*/moved during the run; the state of"):
        train(path, at_step)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["moved"]
    train(tmp_path / "moved")
    assert losses(tmp_path / "moved") == whole


def test_a_run_continues_if_only_its_checkpoints_are_removed(
    tmp_path: Path, whole: dict[int, float]
) -> None:
    folder = tmp_path / "run" / "checkpoints"

    def at_step(step: int) -> None:
        if step == 5:
            while not list(folder.glob("step_*[0-9]")):
                time.sleep(0.001)  # until the checkpoint of step 4 is written
            remove(folder)

    train(tmp_path / "run", at_step)
    assert losses(tmp_path / "run") == whole
    assert sorted(os.listdir(folder)) == ["step_00000008", "step_00000012"]


def test_a_file_system_without_locks_is_reported_for_the_logdir_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(LogdirLostError, match=r"saved in .*run\.rescued"):
        train(tmp_path / "run", lambda step: remove(tmp_path / "run") if step == 5 else None)
    warnings = [text for text in caplog.messages if "no locks" in text]
    assert len(warnings) == 1 and f"{tmp_path / 'run'} has no locks" in warnings[0]


def test_a_logdir_that_becomes_read_only_ends_the_run_which_saves_its_state_beside_it(
    tmp_path: Path, whole: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make_folder = tmp_path / "run", files.make_folder

    def fail_inside(folder: str, **kwargs: Any) -> None:  # root may write to read-only folders
        if folder.startswith(f"{path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        make_folder(folder, **kwargs)

    def at_step(step: int) -> None:
        if step == 2:
            monkeypatch.setattr(files, "make_folder", fail_inside)

    with pytest.raises(LogdirLostError, match=r"step_00000004: Permission denied; "):
        train(path, at_step)
    monkeypatch.undo()
    saved = Checkpoints(str(tmp_path / "run.rescued" / "checkpoints"))
    assert saved.steps()[0] >= 4
    train(tmp_path / "run.rescued")
    assert losses(tmp_path / "run.rescued") == whole


def test_a_logdir_that_is_replaced_while_a_checkpoint_is_written_gets_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, merge = tmp_path / "run", checkpoint_files._merge

    def replaced_meanwhile(*args: Any) -> Any:
        if not files.exists(f"{path}.old"):
            path.rename(f"{path}.old")
            Logdir(str(path)).claim("m.Other")
            shutil.copytree(f"{path}.old/checkpoints", path / "checkpoints")
        return merge(*args)

    monkeypatch.setattr(checkpoint_files, "_merge", replaced_meanwhile)
    with pytest.raises(LogdirLostError, match=r"was moved to .*run\.old during the run"):
        train(path)
    assert os.listdir(path / "checkpoints") == [".unfinished_step_00000004"]  # of the other run
