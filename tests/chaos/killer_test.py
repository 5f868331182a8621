"""Tests that runs that are killed at random moments lose no bit; kill_runs.py does it at length."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
from pathlib import Path

import processes
import pytest

sys.path.append(str(Path(__file__).parent))

import kill_writes
import killer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kills"),
    [("one_device", 4), ("pipeline", 1), ("spmd_pipeline", 1), ("two_processes", 1)],
)
def test_a_run_that_is_killed_and_damaged_is_the_same_to_the_last_bit(
    tmp_path: Path, name: str, kills: int
) -> None:
    damaged_part = 1.0 if name == "one_device" else killer.DAMAGED_PART
    form = killer.FORMS[name]
    if name == "one_device":  # trainer_test.py kills a run that is traced
        form = dataclasses.replace(form, environment=processes.OP_BY_OP)
    else:  # one device is killed in evaluations, too
        form = dataclasses.replace(form, flags=(*form.flags, *killer.NO_EVALUATION))
    # A single kill is one after the first checkpoints, so that there is a state to resume from.
    phases = ("deletion",) if kills == 1 and form.processes == 1 else ()
    one = killer.Killer(form, tmp_path, seed=7, damaged_part=damaged_part, phases=phases)
    one.run(kills)
    assert one.kills == kills
    assert not phases or one.lives[0].newest > 0
    if name == "one_device":
        assert any(life.damaged for life in one.lives)
        assert_differences_are_noticed(tmp_path)


def assert_differences_are_noticed(folder: Path) -> None:
    """Changes a copy of the run without kills in three ways; each must be reported."""
    whole, copy = folder / "whole", folder / "copy"
    shutil.copytree(whole, copy)
    assert not list(killer.compare(whole, copy))
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(lines[3])
    record["loss"] += 1e-7
    (copy / "metrics.jsonl").write_text(
        "".join([*lines[:3], json.dumps(record) + "\n", *lines[4:]])
    )
    (copy / "samples.txt").write_text("something else")
    shutil.rmtree(killer.checkpoints_in(copy)[-1])
    differences = list(killer.compare(whole, copy))
    assert [text.split()[0] for text in differences] == ["figures", "decoded", "checkpoint"]


def test_an_unknown_way_to_execute_is_one_line() -> None:
    program = Path(killer.__file__).with_name("kill_runs.py")
    done = processes.run([str(program), "--only=nothing"])
    assert done.returncode == 2 and "--only has nothing; expected some of" in done.stderr


@pytest.mark.slow
def test_checkpoints_of_two_and_four_processes_that_are_killed_while_they_write() -> None:
    """kill_writes.py does it at length."""
    program = Path(killer.__file__).with_name("kill_writes.py")
    done = processes.run([str(program), "--kills=3", "--seed=1"])
    assert done.returncode == 0, done.stderr
    assert "3 kills" in done.stdout and "no bit lost" in done.stdout


def test_writers_that_end_before_a_checkpoint_is_complete_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_writes, "write", lambda *_: 1)
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\] before a checkpoint"):
        kill_writes.live(tmp_path, 2, random.Random(0))
