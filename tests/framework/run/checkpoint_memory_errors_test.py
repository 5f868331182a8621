"""No memory for a checkpoint or a picture: nothing is taken for damaged, and nothing is lost."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import out_of_memory
from tekso.framework.execution.shards import of_arrays
from tekso.framework.run import tensor_files
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report import curves
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.run.report.report import BEFORE_STEPS, Report

OOM = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[3]")


def store(path: Path) -> Checkpoints:
    checkpoints = Checkpoints(str(path), keep_last=3)
    checkpoints.prepare()
    return checkpoints


def save(checkpoints: Checkpoints, step: int) -> None:
    tensors = {"weights/w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    checkpoints.save(lambda: of_arrays(tensors), Description(step=step, model="m", params="p"))


def saved(path: Path, *steps: int) -> None:
    checkpoints = store(path)
    for step in steps:
        save(checkpoints, step)
    checkpoints.wait()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (tf.compat.v1.train, "NewCheckpointReader", MemoryError("too much")),
        (tf.raw_ops, "RestoreV2", OOM),
    ],
)
def test_a_checkpoint_for_which_there_is_no_memory_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> None:
    saved(tmp_path, 10, 20)
    there = sorted(os.listdir(tmp_path))

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(type(error)):
            good = store(tmp_path).resume()
            assert good is not None
            good.read_slice("weights/w", (slice(0, 2), slice(0, 3)))
    assert sorted(os.listdir(tmp_path)) == there
    good = store(tmp_path).resume()
    assert good is not None and good.step == 20


@pytest.mark.parametrize("error", [OOM, MemoryError("too much")])
def test_a_write_without_memory_leaves_the_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    saved(tmp_path, 10)
    checkpoints = store(tmp_path)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(tensor_files, "write", fail)
    save(checkpoints, 20)
    with pytest.raises(type(error)):  # no WriteError: the folder is not the reason
        checkpoints.wait()
    assert os.listdir(tmp_path) == ["step_00000010"]


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("a.so: failed to map segment from shared object")]
)
def test_a_picture_without_memory_is_a_warning_and_the_report_knows_what_it_was_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(out_of_memory, "limit_bytes", lambda: 10**12)
    monkeypatch.setattr(curves, "draw", fail)
    logdir, output = Logdir(str(tmp_path)), io.StringIO()
    report = Report(logdir, PlainConsole(output), title="m", steps=4)
    logdir.claim("m", warn=print)
    assert report.phase == BEFORE_STEPS
    report.progress(3, "evaluating dev")
    report.draw_curves()
    assert report.phase == "after step 3 (evaluating dev)"
    assert output.getvalue() == f"warning: cannot write {logdir.curves}: out of memory\n"
    report.close()
    logdir.release()
