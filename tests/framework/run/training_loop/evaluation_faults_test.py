"""An error of an evaluation ends a run after the state is saved, and says where it resumes."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_runs import FakeProgram, Run, eval_batches, train_batches

from tekso.framework import graph_errors, out_of_memory
from tekso.framework.execution.worker_pool import LostServerError
from tekso.framework.run import checkpoint_files


def failing(error: Exception, after: int = 1) -> Any:
    """Returns batches of an evaluation that fails after some of them."""

    def batches(start: int) -> Iterator[Any]:
        for i, batch in enumerate(eval_batches(start)):
            if i == after:
                raise error
            yield batch

    return batches


def failed(run: Run, error: Exception, **options: Any) -> list[str]:
    """Trains until the error; returns its notes."""
    with pytest.raises(type(error)) as caught:
        run.train(**options)
    assert caught.value is error
    return list(error.__notes__)


@pytest.mark.parametrize("checkpoint_every", [4, 5])
def test_the_state_is_saved_before_an_error_and_the_next_start_continues(
    tmp_path: Path, whole: Run, checkpoint_every: int
) -> None:
    run, error = Run(tmp_path), IndexError("no such row")
    evaluations = {"dev": eval_batches, "test": failing(error)}
    notes = failed(run, error, evaluations=evaluations, checkpoint_every=checkpoint_every)
    assert notes == [f"{graph_errors.RESUMES}step 5"]
    assert run.saved() == ([4, 5] if checkpoint_every == 4 else [5])
    path = tmp_path / "checkpoints" / "step_00000005" / "checkpoint.json"
    metrics = json.loads(path.read_text())["metrics"]
    assert metrics["dev/loss"] == run.losses("dev")[5] and "test/loss" not in metrics
    assert run.train().first_step == 5
    assert run.losses() == whole.losses() and run.losses("dev") == whole.losses("dev")


def test_an_evaluation_of_a_resumed_step_that_fails_again_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        error = IndexError("no such row")
        notes = failed(run, error, evaluations={"dev": failing(error)})
        assert notes == [f"{graph_errors.RESUMES}step 5"] and run.saved() == [4, 5]


def test_decoding_of_the_last_evaluation_that_fails_loses_no_step(tmp_path: Path) -> None:
    error = FileNotFoundError("no references")

    def score(name: str, is_last: bool, stopped: Any) -> None:
        if is_last:
            raise error

    run = Run(tmp_path)
    notes = failed(run, error, steps=7, checkpoint_every=0, eval_every=3, score=score)
    assert notes == [f"{graph_errors.RESUMES}step 7"] and run.saved() == [7]


@pytest.mark.parametrize(
    ("error", "steps", "resumes"),
    [
        (OSError(errno.ENOSPC, "no space"), 20, "step 4"),
        (RuntimeError("writing failed: No space left on device"), 20, "step 4"),
        (LostServerError("ps:0"), 20, "step 4"),
        (IndexError("no such row"), 0, "the beginning, since nothing was saved yet"),
    ],
)
def test_a_state_that_cannot_be_written_or_is_the_first_one_is_not_saved(
    tmp_path: Path, error: Exception, steps: int, resumes: str
) -> None:
    run = Run(tmp_path)
    notes = failed(run, error, steps=steps, evaluations={"dev": failing(error)})
    assert notes == [graph_errors.RESUMES + resumes]
    assert run.saved() == ([4] if steps else [])


def test_a_step_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[Any]:
        for step, batch in enumerate(train_batches(start), start):
            yield batch if step < 4 else {"x": np.full((5, 3), np.inf)}

    run, error = Run(tmp_path), IndexError("no such row")
    notes = failed(run, error, batches=batches, evaluations={"dev": failing(error)})
    assert notes == [f"{graph_errors.RESUMES}step 4; step 5 is not saved: not finite"]
    assert run.saved() == [4]


def test_the_error_of_the_evaluation_is_raised_even_if_the_state_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_files.write_shards

    def fail(path: str, *args: Any, **options: Any) -> None:
        if path.endswith("5"):
            raise OSError(errno.EACCES, "Permission denied", path)
        write(path, *args, **options)

    monkeypatch.setattr(checkpoint_files, "write_shards", fail)
    run, error = Run(tmp_path), IndexError("no such row")
    notes = failed(run, error, evaluations={"dev": failing(error)})
    assert notes == [f"{graph_errors.RESUMES}step 4; step 5 is not saved: Permission denied"]


@pytest.mark.parametrize(("limit", "saved"), [(None, [4, 5]), (1 << 33, [4])])
def test_too_little_memory_is_no_reason_to_lose_a_step_unless_the_address_space_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, saved: list[int]
) -> None:
    monkeypatch.setattr(out_of_memory, "limit_bytes", lambda: limit)
    run, error = Run(tmp_path), MemoryError("Unable to allocate 9 GiB")
    failed(run, error, evaluations={"dev": failing(error)})
    assert run.saved() == saved


def test_a_program_that_fails_in_an_evaluation_is_saved(tmp_path: Path) -> None:
    error = ValueError("indices[0] = 7 is not in [0, 5)")

    class Program(FakeProgram):
        def eval_step(self, batch: Any) -> Any:
            raise error

    run = Run(tmp_path)
    assert failed(run, error, program=Program()) == [f"{graph_errors.RESUMES}step 5"]
    assert run.saved() == [4, 5]
