"""Runs of the training loop that were killed or failed, and are started again."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import killed_runs_program
import numpy as np
import processes
import pytest
from killed_runs_program import KILLED
from loop_runs import FakeProgram, Run

from tekso.framework.run import time_use
from tekso.framework.run.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run for each moment of KILLED."""
    folder = tmp_path_factory.mktemp("killed")
    done = processes.run([killed_runs_program.__file__, str(folder)], timeout=300)
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


@pytest.mark.parametrize("key", ["examples_seen", "_seen"])  # the second one in earlier versions
def test_units_seen_are_those_of_an_uninterrupted_run(key: str, tmp_path: Path) -> None:
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
    progress = tmp_path / "killed" / "progress.jsonl"
    progress.write_text(progress.read_text().replace("examples_seen", key))
    killed.train(log_every=3, batches=batches, keep_best=0, steps_per_call=3)
    seen = {r["step"]: r["examples_seen"] for r in killed.records("train")}
    assert seen == {n: sum(2 + i % 5 for i in range(n)) for n in (1, 3, 6, 9, 12, 15, 18, 20)}
    assert seen == {r["step"]: r["examples_seen"] for r in whole.records("train")}
    lines = progress.read_text().splitlines()
    marks = {mark["step"]: mark for mark in map(json.loads, lines)}
    for step in (4, 8, 12, 16, 20):  # those before step 11 are of the process that was killed
        name = key if step < 11 else "examples_seen"
        assert marks[step][name] == sum(2 + i % 5 for i in range(step))


@pytest.mark.parametrize("moment", KILLED)
def test_killed_at_any_moment_continues_from_the_newest_complete_checkpoint_as_the_same_run(
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


def test_a_finished_run_changes_nothing_and_more_steps_continue(tmp_path: Path, whole: Run) -> None:
    run = Run(tmp_path)
    run.train(10)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    outcome = run.train(10)
    assert (outcome.first_step, outcome.step) == (10, 10)
    assert outcome.evaluations["dev"]["loss"] == run.losses("dev")[10]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run.train(20)
    assert run.losses() == whole.losses()


def test_a_torn_checkpoint_is_reported_and_the_run_resumes_from_the_one_before(
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
