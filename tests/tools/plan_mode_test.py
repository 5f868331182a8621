"""--mode=plan: what it prints, and its exit code."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from planned_runs import MODEL

from tekso.framework.exit_codes import ExitCode
from tekso.tools import trainer


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "input.length=0",
            ["input.length is 0, but must be at least 1", "task.decode.window is 0"],
        ),
        ("task.model.dim=7", ["MultiHeadAttention: num_heads 4 does not divide"]),
    ],
)
def test_problems_for_which_there_are_no_costs_are_in_the_json(
    setting: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tekso-trainer", "--mode=plan", f"--model={MODEL}", f"--set={setting}"]
    assert trainer.main([*words, "--device=cpu", "--format=json"]) == ExitCode.FAILED
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["ok"] is False and record["step"] is None
    for problem, begin in zip(record["problems"], said, strict=True):
        assert problem.startswith(begin)
    assert said[-1] in printed.err
    assert trainer.main([*words, "--device=cpu"]) == ExitCode.FAILED
    printed = capsys.readouterr()
    assert printed.out == "".join(
        f"{MODEL}\n\nproblem: {problem}\n" for problem in record["problems"][:-1]
    )
    assert said[-1] in printed.err


def test_a_length_that_no_graph_can_have_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, limits[1]))
    try:
        words = ["tekso-trainer", "--mode=plan", f"--model={MODEL}", "--device=cpu"]
        assert trainer.main([*words, "--set=input.length=100000000"]) == ExitCode.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    printed = capsys.readouterr()
    assert "100,000,000 × 100,000,000, is too large for a graph" in printed.err
    assert "in the layer model/stack/layers/0/attention" in printed.err


def test_the_mode_prints_text_and_json_and_its_exit_code_says_whether_the_run_would_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tekso-trainer", "--mode=plan", f"--model={MODEL}", "--set=*.num_layers=1"]
    words.append("--device=cpu")
    assert trainer.main([*words, "--steps=30"]) == ExitCode.OK
    output = capsys.readouterr().out
    assert f"a new run in runs/{MODEL}: 30 steps are left" in output
    assert not (tmp_path / "runs").exists()
    assert trainer.main([*words, "--devices=3", "--format=json"]) == ExitCode.FAILED
    record = json.loads(capsys.readouterr().out)
    assert record["step"] is None and record["resumes_from"] is None
    assert record["device"] == "cpu" and "does not divide" in record["problems"][0]
    assert trainer.main([*words, "--warm_start=missing"]) == ExitCode.FAILED
    assert "run.warm_start.main.checkpoint is 'missing'" in capsys.readouterr().out
    assert trainer.main([*words[:-1], "--device=tpu3"]) == ExitCode.WRONG_USAGE
    assert "--device=tpu3: there is no device type 'tpu3'; did you" in capsys.readouterr().err
