"""Tests of the comparison of predicted with measured memory; the processes are replaced."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tekso.tools import pipeline_memory


def test_memory_of_all_stages_is_beside_the_measurement_for_every_k_and_m(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    memory: list[float | None] = [50e6]  # of TensorFlow's statistics; None: there are none

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if any("bad" in word for word in command):
            reason = "a line\nthe reason\n" if "--model=bad.model" in command else ""
            raise subprocess.CalledProcessError(-9, command, stderr=reason)
        found = {"shared_bytes": 45e6, "counted_bytes": 40e6, "step_memory_bytes": memory[0]}
        return SimpleNamespace(stdout=json.dumps(found))

    monkeypatch.setattr(subprocess, "run", run)
    assert pipeline_memory.main(["x", "lm.a.B c.d=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["all", "4", "16", "45", "40", "50", "-20", "%"]
    assert len(commands) == 2 * 2 * 3 * 3
    assert all("--set=c.d=1" in command and "--model=lm.a.B" in command for command in commands)
    last = commands[-1]
    assert "tekso.tools.benchmark" in last and "--set=execution.num_micro_batches=16" in last
    assert pipeline_memory.main(["x", "bad.model"]) == 1
    assert "bad.model: the reason" in capsys.readouterr().err
    assert pipeline_memory.main(["x", "bad.killed"]) == 1
    assert "bad.killed: tekso.tools.trainer ended with exit code -9" in capsys.readouterr().err
    memory[0] = None
    assert pipeline_memory.main(["x", "lm.a.B"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3:] == ["45", "40", "-", "-"]
