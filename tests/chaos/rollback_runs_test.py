"""Runs whose loss overflows on some batches, on a mesh and in a pipeline, from end to end."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest

sys.path.append(str(Path(__file__).parent))

import killer

from tekso.framework.exit_codes import ExitCode


def poisoned(name: str, setting: str) -> killer.Form:
    form = killer.FORMS[name]
    flags = (*form.flags, *killer.NO_EVALUATION, f"--set=input.{setting}")
    environment = processes.GRAPH_OPTIMIZER_OFF  # it takes longer than the steps
    return dataclasses.replace(form, flags=flags, model=killer.POISONED, environment=environment)


def train(name: str, setting: str, logdir: Path) -> subprocess.CompletedProcess[str]:
    form = poisoned(name, setting)
    command = ["-m", "tekso.tools.trainer", f"--model={form.model}", f"--logdir={logdir}"]
    environment = {**os.environ, **form.environment, "PYTHONPATH": str(killer.HERE)}
    return processes.run(
        [*command, "--import=small_runs", *form.flags], cwd=killer.HERE, env=environment
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "phase"), [("mesh", "rollback"), ("pipeline", "incident")])
def test_a_rolled_back_run_equals_one_without_the_batches_also_if_it_is_killed(
    tmp_path: Path, name: str, phase: str
) -> None:
    one = killer.Killer(poisoned(name, "bad=[5,6,7]"), tmp_path, seed=3, phases=(phase,))
    one.run(1)
    assert one.kills == 1
    whole, other = tmp_path / "whole", tmp_path / "other"
    done = train(name, "left_out=[5,6,7]", other)
    assert done.returncode == 0, done.stderr
    losses = [
        {step: record["loss"] for (split, step), record in killer.figures(path).items()
         if split == "train"}
        for path in (whole, other)
    ]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 12
    folder = whole / "incidents" / "step_00000005"
    assert json.loads((folder / "incident.json").read_text())["batch"] == 5
    command = ["-m", "tekso.tools.trainer", "--mode=replay", f"--incident={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(killer.HERE)}
    done = processes.run([*command, "--import=small_runs"], cwd=killer.HERE, env=environment)
    assert done.returncode == 0, done.stderr
    assert "first op: " in done.stdout


# The test above names the first op under both executions; rollback_test.py ends a run after the
# last rollback.
@pytest.mark.timeout(1800)
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["mesh", "pipeline"])
def test_after_the_last_rollback_the_first_op_is_named(tmp_path: Path, name: str) -> None:
    done = train(name, f"bad={list(range(5, 40))}", tmp_path / "run")
    assert done.returncode == ExitCode.NOT_FINITE, done.stderr
    assert "The run was rolled back 2 times" in done.stderr
    assert "first op: " in done.stderr and "Traceback" not in done.stderr
