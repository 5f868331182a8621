"""Tests of the comparison of plans with measurements; the processes are replaced."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tekso.tools import plan_accuracy


def test_plan_and_measurement_are_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if any("bad" in word for word in command):
            raise subprocess.CalledProcessError(1, command, stderr="a line\nthe reason\n")
        planned = {"seconds": 0.02, "core_seconds": 0.03, "counted_bytes": 9e6}
        measured = {"step_ms": {"median": 25.0}, "cpu_ms": {"median": 40.0}}
        both = {"step": planned, **measured, "step_memory_bytes": 6e6}
        return SimpleNamespace(stdout=json.dumps(both))

    monkeypatch.setattr(subprocess, "run", run)
    assert plan_accuracy.main(["x", "lm.a.B c.d=1", "bad.model"]) == 1
    output = capsys.readouterr()
    (row,) = [line for line in output.out.splitlines() if line.startswith("lm.a.B")]
    assert row.split() == [
        *("lm.a.B", "c.d=1", "20", "ms", "25", "ms", "25", "ms", "25", "ms", "-20", "%"),
        *("30", "ms", "40", "ms", "-25", "%", "9", "MB", "6", "MB", "+50", "%"),
    ]
    assert "bad.model: the reason" in output.err
    of_bad = [command for command in commands if "--model=bad.model" in command]
    assert len(of_bad) == 1  # it is not tried again in the next rounds
    planning, measuring = commands[:2]
    assert "tekso.tools.benchmark" in measuring and "--mode=plan" in planning
    assert "--warmup=100" in measuring  # 5 seconds would be 250 steps
    assert all("--set=c.d=1" in command and "--model=lm.a.B" in command for command in commands[:2])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        found.append(" ".join(command))
        planned = {"seconds": 0.02, "core_seconds": 0.03, "counted_bytes": 9e6}
        measured = {"step_ms": {"median": 25.0}, "cpu_ms": {"median": 40.0}}
        both = {"step": planned, **measured, "step_memory_bytes": None}
        return SimpleNamespace(stdout=json.dumps(both))

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_steps_on_several_devices_are_planned_and_measured_with_the_same_devices(
    commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_accuracy.main(["x", "several_devices", "--rounds=1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 * 5 + 2
    measuring = [c for c in commands if "tekso.tools.benchmark" in c]
    planning = [c for c in commands if "--mode=plan" in c]
    assert len(measuring) == len(planning) == 4 * 5
    for devices in (2, 4):
        assert sum(f"--cpu_devices={devices} " in c for c in measuring) == {2: 12, 4: 8}[devices]
        assert sum(f" --devices={devices} " in c for c in planning) == {2: 12, 4: 8}[devices]
    assert sum("--execution=data_parallel" in c for c in planning) == 4
    assert sum("--set=execution.mesh=x:4" in c for c in measuring) == 8


def test_words_of_an_argument_reach_both_processes(commands: list[str]) -> None:
    words = "lm.a.B c.d=2 --execution=data_parallel --devices=2 --import=my_package"
    assert plan_accuracy.main(["x", words, "--rounds=1"]) == 0
    assert len(commands) == 2
    for command, devices in zip(commands, ("--devices=2", "--cpu_devices=2"), strict=True):
        given = ["--model=lm.a.B", "--set=c.d=2", "--execution=data_parallel", devices]
        assert {*given, "--import=my_package"} <= {*command.split()}


def test_pipelines_are_planned_and_measured(
    commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_accuracy.main(["x", "pipelines", "--rounds=1"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:-2]
    assert len(rows) == 6 and len(commands) == 2 * len(rows)
    stages = "--execution=pipelined --set=execution.num_stages=2 "
    stages += "--set=execution.num_micro_batches=4"
    assert all(stages in command for command in commands)


def test_stages_on_meshes_are_compared_without_memory_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        four = "--cpu_devices=4" if "tekso.tools.benchmark" in command else "--devices=4"
        assert four in command and "--model=lm.python_source.TinyMeshPipeline" in command
        planned = {"seconds": 0.02, "core_seconds": None, "counted_bytes": None}
        measured = {"step_ms": {"median": 25.0}, "cpu_ms": {"median": 40.0}}
        both = {"step": planned, **measured, "step_memory_bytes": 6e6}
        return SimpleNamespace(stdout=json.dumps(both))

    monkeypatch.setattr(subprocess, "run", run)
    assert plan_accuracy.main(["x", "stages_on_meshes"]) == 0
    *rows, time, memory = capsys.readouterr().out.splitlines()[1:]
    assert time == "time within 25 %: 4 of 4" and memory == "memory within 15 %: 0 of 0"
    assert len(rows) == 4
    figures = [
        *("20", "ms", "25", "ms", "25", "ms", "25", "ms", "-20", "%"),
        *("-", "40", "ms", "-"),
        *("-", "6", "MB", "-"),
    ]
    assert all(row.split()[-len(figures) :] == figures for row in rows)


def test_the_median_of_rounds_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"lm.a.B": iter([30.0, 20.0, 90.0]), "lm.a.C": iter([40.0, 31.0, 20.0])}
    order: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        (model,) = [word[8:] for word in command if word.startswith("--model=")]
        if "--mode=plan" in command:
            step = {"seconds": 0.0225, "core_seconds": 0.03, "counted_bytes": 9e6}
            return SimpleNamespace(stdout=json.dumps({"step": step}))
        order.append(model)
        times = {"step_ms": {"median": next(steps[model])}, "cpu_ms": {"median": 40.0}}
        return SimpleNamespace(stdout=json.dumps({**times, "step_memory_bytes": 8e6}))

    monkeypatch.setattr(subprocess, "run", run)
    assert plan_accuracy.main(["x", "lm.a.B", "lm.a.C"]) == 0
    output = capsys.readouterr()
    first, second, *counts = output.out.splitlines()[1:]
    assert first.split()[1:11] == [*("22.5", "ms", "30", "ms", "20", "ms", "90", "ms", "-25", "%")]
    assert second.split()[1:11] == [*("22.5", "ms", "31", "ms", "20", "ms", "40", "ms", "-27", "%")]
    assert counts == ["time within 25 %: 1 of 2", "memory within 15 %: 2 of 2"]
    assert order == 3 * ["lm.a.B", "lm.a.C"]  # a slow minute is not that of one model
    assert "round 3 of 3: lm.a.B: planned 22.5 ms, measured 90 ms" in output.err


def test_a_plan_with_problems_is_named_with_the_first_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        printed = json.dumps({"problems": ["no axis x", "another one"]})
        raise subprocess.CalledProcessError(1, command, output=printed, stderr="a line of a log\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert plan_accuracy.main(["x", "lm.a.B"]) == 1
    assert capsys.readouterr().err == "lm.a.B: no axis x\n"
