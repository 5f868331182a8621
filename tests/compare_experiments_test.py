"""The program that compares experiments, with results in place of trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_experiments
import pytest
import shrunk_experiments_test as matrix
from shrunk_program import ALONE, COMPILED

MLP, CNN = "image.digits.Mlp", "image.digits.Cnn"
RESULT = {
    "steps": [dict.fromkeys(("loss", "total_loss", "gradient_norm"), 1.0)],
    "evaluation": {"loss": [2.0, 3.0]},
    "ops": ["AssignVariableOp"],
    "hlo": ["dot f32"],
    "cpu_s": 0.1,
}
WITHOUT_ASSIGNMENTS = {**RESULT, "ops": []}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns what is trained: an MLP compiles, and a CNN does not."""
    found = []

    def results(key: str, executions: list[str]) -> dict[str, Any]:
        found.append((key, executions))
        given = dict.fromkeys(executions, RESULT)
        if key == CNN:
            given[COMPILED] = {"crash": "XLA has no kernel for an op"}
        return given

    monkeypatch.setattr(matrix, "results", results)
    return found


def test_it_adds_a_line_for_each_execution_and_continues(
    trained: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "matrix.jsonl"
    command = [f"--results={file}", f"--executions={COMPILED},mesh", MLP, CNN]
    assert compare_experiments.main(command) == 1
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["key"], r["execution"], r["outcome"]) for r in records] == [
        (MLP, COMPILED, "equal"),
        (MLP, "mesh", "equal"),
        (CNN, COMPILED, "CRASH"),
        (CNN, "mesh", "equal"),
    ]
    assert "CRASH: XLA has no kernel for an op" in capsys.readouterr().out
    trained.clear()
    compare_experiments.main(command)
    assert trained == [(CNN, [ALONE, COMPILED])]


def test_it_selects_what_has_no_result(
    trained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "NOT_RUN", {"mesh": (MLP,)})
    assert compare_experiments.main([f"--results={tmp_path / 'a'}", "--not_run"]) == 0
    assert trained == [(MLP, [ALONE, "mesh"])]


@pytest.mark.parametrize("content", [None, '{"key": "image.digits.Mlp", "exec', '{"key": 1}\n'])
def test_results_that_cannot_be_continued_are_one_line_before_a_training(
    trained: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / ("none/a" if content is None else "a")
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        compare_experiments.main([f"--results={file}", MLP])
    assert f"--results={file} cannot be continued: " in capsys.readouterr().err
    assert not trained


def test_a_step_that_lacks_something_is_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {ALONE: RESULT, COMPILED: WITHOUT_ASSIGNMENTS}
    monkeypatch.setattr(matrix, "results", lambda key, executions: both)
    (record,) = compare_experiments.compare(MLP, [COMPILED])
    assert record["outcome"] == "DIFFERENT"
    assert record["reason"] == "the update is not in the program"


def test_an_unknown_experiment_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare_experiments.main([f"--results={tmp_path / 'a'}", "image.digits.Cnm"])
    assert "unknown: ['image.digits.Cnm']; allowed are [" in capsys.readouterr().err
