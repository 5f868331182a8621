"""Readers of checkpoints beside a training that deletes them."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import threading
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

from tekso.framework.execution.shards import of_arrays
from tekso.framework.run import checkpoint_files, checkpoint_tables, lease
from tekso.framework.run.checkpoint_errors import DeletedCheckpointError
from tekso.framework.run.checkpoint_tables import records
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints, Description


class Training:
    """Saves checkpoints whose weights are the step, and keeps the newest two and the best one."""

    def __init__(self, path: Path) -> None:
        self.step = 0
        self.checkpoints = Checkpoints(str(path), keep_last=2, keep_best=1, metric="dev/loss")
        self.checkpoints.prepare()

    def continue_training(self, saves: int = 3) -> None:
        for _ in range(saves):
            self.step += 1
            state = functools.partial(of_arrays, {"weights/w": np.full(3, self.step)})
            metrics = {"dev/loss": -float(self.step)}  # every step is the best one
            self.checkpoints.save(
                state, Description(step=self.step, model="m", params="p", metrics=metrics)
            )
        self.checkpoints.wait()


@pytest.fixture
def training(tmp_path: Path) -> Training:
    training = Training(tmp_path)
    training.continue_training()
    return training


def reader(path: Path) -> Checkpoints:
    def warn(text: str) -> None:
        raise AssertionError(text)

    return Checkpoints(str(path), warn=warn)


def assert_readable(checkpoint: Checkpoint | None) -> None:
    assert checkpoint is not None
    np.testing.assert_array_equal(checkpoint.read("weights/w"), np.full(3, checkpoint.step))


def test_what_is_read_is_deleted_only_after_its_readers_have_ended(
    tmp_path: Path, training: Training
) -> None:
    newest, same = reader(tmp_path).newest_good(unread=True), reader(tmp_path).open("3")
    earlier = reader(tmp_path).open("2")
    training.continue_training()
    for checkpoint in (newest, same, earlier):
        assert_readable(checkpoint)
    assert training.checkpoints.steps() == [2, 3, 5, 6]
    del newest, earlier, checkpoint
    training.continue_training(1)
    assert training.checkpoints.steps() == [3, 6, 7]
    same.release()
    training.continue_training(1)
    assert training.checkpoints.steps() == [7, 8]


KILLED = """
import os, signal, sys
from tekso.framework.run.checkpoints import Checkpoints
reads = Checkpoints(sys.argv[1]).open("3")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_reader_keeps_nothing(tmp_path: Path, training: Training) -> None:
    assert processes.run(["-c", KILLED, tmp_path]).returncode == -9
    training.continue_training()
    assert training.checkpoints.steps() == [5, 6]


OPENINGS: dict[str, Callable[[Checkpoints], Any]] = {
    "newest": lambda checkpoints: checkpoints.newest_good(),
    "best": lambda checkpoints: checkpoints.best("dev/loss", "min"),
    "last": lambda checkpoints: checkpoints.last(2)[-1],
}


@pytest.mark.parametrize("moment", ["listed", "opened"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_reader_takes_a_newer_checkpoint_if_its_own_is_deleted(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch, opening: str, moment: str
) -> None:
    def meanwhile(act: Callable[..., Any], *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        training.continue_training()
        return act(*args, **options)

    if moment == "listed":
        act = checkpoint_files._open
        monkeypatch.setattr(checkpoint_files, "_open", functools.partial(meanwhile, act))
    else:  # after the file was opened, and before it is locked
        act = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", functools.partial(meanwhile, act))
    found = OPENINGS[opening](reader(tmp_path))
    assert found.step >= 5
    assert_readable(found)


def test_a_list_leaves_out_what_is_deleted_meanwhile(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = checkpoint_tables.check_files

    def after_saves(path: str, description: Description) -> None:
        training.continue_training(2)
        verified(path, description)

    monkeypatch.setattr(checkpoint_tables, "check_files", after_saves)
    (record,) = records(str(tmp_path))  # the lease of step 2 is taken, that of step 3 is too late
    assert (record["step"], record["state"]) == (2, "good")


def test_without_locks_a_deleted_checkpoint_is_an_error_that_says_what_to_do(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_locks = OSError(errno.EOPNOTSUPP, "Operation not supported")
    monkeypatch.setattr(fcntl, "flock", unittest.mock.Mock(side_effect=no_locks))
    found = reader(tmp_path).newest_good(unread=True)
    assert found is not None
    assert_readable(found)
    found = reader(tmp_path).newest_good(unread=True)
    assert found is not None
    training.continue_training()
    with pytest.raises(DeletedCheckpointError, match=r"step_00000003 was deleted.*Repeat the com"):
        found.read("weights/w")


def test_a_fifo_in_place_of_a_description_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / lease.DESCRIPTION)
    reader = threading.Thread(target=lease.Lease, args=[str(tmp_path)], daemon=True)
    reader.start()
    reader.join(timeout=20)
    waits = reader.is_alive()
    if waits:  # end it
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    assert not waits
    with lease.unused(str(tmp_path)) as is_unused:
        assert is_unused
