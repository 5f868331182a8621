"""Tests of tekso-pipeline-benchmark: its ratios, table and errors, and one complete run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import processes
import pytest

from tekso.tools import pipeline_benchmark

TINY = [
    "task.model.vocab_size=50",
    "task.model.dim=16",
    "task.model.stack.num_layers=2",
    "task.model.stack.layer.feed_forward.hidden_dim=24",
    "input.vocab_size=50",
    "input.length=8",
    "input.batch_size=4",
]


def figures(step_ms: float, peak: float, **more: float) -> dict[str, float | None]:
    names = ("cpu_ms", "pipeline_ms", "simulated_ms", "measured_by_simulated")
    rest = {name: more.get(name) for name in names}
    return {"step_ms": step_ms, "peak_above_state_bytes": peak, **rest}


FOUND = {
    "one device": [figures(100.0, 4e6, cpu_ms=90.0), figures(300.0, 4e6), figures(110.0, 4e6)],
    "gpipe": [figures(50.0, 8e6), figures(60.0, 8e6), figures(55.0, 8e6)],
    "1f1b": [figures(44.0, 2e6), figures(40.0, 2e6), figures(400.0, 2e6)],
}


def test_rows_are_medians_of_the_turns_with_ratios_to_one_device_and_to_gpipe() -> None:
    alone, gpipe, other = pipeline_benchmark.rows(FOUND)
    assert [row["step_ms"] for row in (alone, gpipe, other)] == [110.0, 55.0, 44.0]
    assert (alone["times_as_fast"], gpipe["times_as_fast"]) == (1.0, 2.0)
    assert other["times_as_fast"] == pytest.approx(2.5)
    assert (gpipe["memory_by_one_device"], other["memory_by_one_device"]) == (2.0, 0.5)
    assert (alone["memory_by_gpipe"], other["memory_by_gpipe"]) == (0.5, 0.25)
    assert alone["pipeline_ms"] is None


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--schedules=1f1b,gpip", "'gpip', expected one of gpipe, .*did you mean gpipe"),
        ("--schedules=interleaved_1f1b", "3 micro-batches"),
        ("--rematerialize=none,al", "'al'.*all"),
    ],
)
def test_what_no_pipeline_takes_is_refused_before_anything_is_measured(
    flag: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(pipeline_benchmark, "_measured", lambda case, _: measured.append(case.name))
    args = ["--model=lm.benchmark.Small", "--num_micro_batches=3", flag]
    assert pipeline_benchmark.main(["tekso-pipeline-benchmark", *args]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not measured


def test_without_gpipe_there_is_no_ratio_to_it() -> None:
    rows = pipeline_benchmark.rows({name: FOUND[name] for name in ("one device", "1f1b")})
    assert [row["memory_by_gpipe"] for row in rows] == [None, None]


def test_table_has_a_line_for_each() -> None:
    record = {
        "model": "m",
        "num_stages": 2,
        "num_micro_batches": 16,
        "turns": 3,
        "steps": 10,
        "rows": pipeline_benchmark.rows(FOUND),
        "processor": "a processor",
    }
    lines = pipeline_benchmark.text(record).splitlines()
    assert lines[0] == "m: 2 stages, 16 micro-batches; medians of 3 × 10 steps"
    assert " ".join(lines[2].split()) == (
        "step ms cpu ms pipeline ms simulated ratio speedup memory MiB / one / gpipe"
    )
    assert lines[5].split() == ["1f1b", "44.0", "2.50", "2", "0.50", "0.25"]
    assert lines[-1] == "a processor"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--model is missing"),
        (["--model=lm.benchmark.Small", "--num_stage=2"], "did you mean --num_stages?"),
        (["--model=lm.benchmark.Small", "--turns=0"], "--turns=0"),
        (["--model=lm.benchmark.Smal"], "one device: tekso-benchmark: "),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipeline_benchmark.main(["tekso-pipeline-benchmark", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_it_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", processes.interpreter(tmp_path / "python"))
    # LLVM takes longer to optimize than the steps take.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    args = ["--model=lm.benchmark.Small", "--num_micro_batches=2", "--schedules=1f1b"]
    args += ["--steps=2", "--warmup=1", "--format=json", *(f"--set={s}" for s in TINY)]
    assert pipeline_benchmark.main(["tekso-pipeline-benchmark", *args]) == 0
    record = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in record["rows"]]
    assert names == ["one device", "1f1b", "1f1b, rematerialize all"]
    alone, *piped = record["rows"]
    assert alone["pipeline_ms"] is None and alone["times_as_fast"] == 1.0
    for row in piped:
        assert row["simulated_ms"] > 0 and 0 < row["pipeline_ms"] < row["step_ms"]
    for row in record["rows"]:
        assert row["cpu_ms"] > 0 and row["peak_above_state_bytes"] > 0
