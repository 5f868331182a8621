"""Tests of the command lines --mode=inspect_pipeline and --trace_pipeline."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path

import processes
import pytest
from matplotlib.image import imread
from traced_pieces import traced_once

from tekso.tools import trainer

__all__ = ["traced_once"]

TINY = ["--model=lm.python_source.Tiny", "--execution=pipelined"]
PIPELINE = "--model=lm.python_source.TinyPipeline"


def main(*args: str) -> int:
    return trainer.main(["tekso-trainer", "--mode=inspect_pipeline", *args])


# --- looking at it ---


def test_text_shows_stages_devices_and_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PIPELINE) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "lm.python_source.TinyPipeline"
    assert lines[2].startswith("4 stages on 4 devices; 16 examples in 8 micro-batches of")
    assert "  model/embedding … model/stack/layers/0 (2)" in lines
    assert "total: 853,120 weights" in text
    four_numbers_a_weight = r"^ +1 +3\.1\d MB +3 +[\d.]+ MB +[\d.]+ MB$"
    assert re.search(four_numbers_a_weight, text, re.MULTILINE)
    assert re.search(r"^device 3 │.*│ holds 1$", text, re.MULTILINE)
    assert all(len(line) <= 80 for line in lines)


def test_json_has_every_stage_and_the_course_of_the_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(*TINY, "--set=execution.num_stages=2", "--set=execution.balance=[2,6]",
                "--set=execution.num_micro_batches=8", "--set=execution.schedule=gpipe",
                "--format=json") == 0  # fmt: skip
    record = json.loads(capsys.readouterr().out)
    first, last = record["stages"]
    assert first["layers"] == ["model/embedding", "model/stack/layers/0"]
    assert len(last["layers"]) == 6
    assert first["weights"] + last["weights"] == 853_120
    assert (first["device"], last["device"]) == (0, 1)
    assert first["flops_with_backward"] == 3 * first["flops"] > 0
    assert first["handed_bytes"] == 2 * 128 * 128 * 4
    assert first["optimizer_bytes"] == 2 * first["weight_bytes"]  # of Adam
    assert record["held_micro_batches"] == [8, 8]
    assert (record["balance"], record["num_micro_batches"]) == ([2, 6], 8)
    # The second stage costs a / b times the first; in its units:
    share = first["cost_share"] / last["cost_share"]
    assert record["makespan"] == pytest.approx(8 + share)
    assert record["idle_share"] == pytest.approx(1 - 8 * (1 + share) / (2 * (8 + share)))


def test_picture_is_written_where_output_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "below" / "schedule.png"
    assert main(PIPELINE, f"--output={file}") == 0
    assert imread(io.BytesIO(file.read_bytes()), format="png").ndim == 3
    assert "simulated 1f1b" in capsys.readouterr().out


# --- what is typed wrong ---


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set=execution.num_stages=9"], "at least 9 pieces, and the task has 8:"),
        (
            ["--set=execution.num_micro_batches=5"],
            "input.batch_size 16 does not divide evenly over 5 micro-batches "
            "(execution.num_micro_batches); the nearest that do: 15, 20",
        ),
        (["--set=execution.balance=[3,4]"], "execution.balance [3, 4] adds up to 7, but the task"),
        (["--set=execution.balance=[3,4,1]"], "has 3 numbers for 2 stages"),
        (["--set=execution.schedule=1f1"], "zero_bubble_h1, or the Params of a custom"),
        (["--set=execution.num_stages=0"], "execution.num_stages is 0, but must be at least 1"),
        (["--set=execution.rematerialize=some"], "execution.rematerialize"),
        (["--execution=data_parallel"], "is DataParallel, which has no stages: set one, as in"),
    ],
)
def test_what_does_not_fit_is_reported_without_a_traceback(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*TINY, *args) in (1, 2)
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_flags_of_another_mode_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["tekso-trainer", PIPELINE, "--trace_pipeline"]
    assert trainer.main([*trace, "--mode=eval"]) == 2
    assert "--trace_pipeline works only with --mode=train, not with eval" in capsys.readouterr().err
    assert trainer.main(["tekso-trainer", PIPELINE, "--output=a.png"]) == 2
    assert "--output works only with --mode=inspect_pipeline" in capsys.readouterr().err
    assert trainer.main([*trace, "--execution=data_parallel"]) == 1
    error = capsys.readouterr().err
    assert "--trace_pipeline requires a pipeline, but the execution of this experiment is" in error


# --- a training ---

SMALL = [
    "--set=task.model.dim=16",
    "--set=task.model.stack.layer.feed_forward.hidden_dim=32",
    "--set=task.decode=None",
    "--set=input.length=16",
    "--set=eval_inputs={}",
]


def train(logdir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "tekso.tools.trainer", PIPELINE, f"--logdir={logdir}"]
    return processes.run([*command, *SMALL, *args], optimized=False)


@pytest.mark.slow
def test_training_with_trace_shows_a_measured_step_beside_the_predicted(tmp_path: Path) -> None:
    done = train(tmp_path, "--steps=7", "--trace_pipeline", "--log_every=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("measured: ")]
    assert lines[at - 1].startswith("step 5/7 ")
    assert sum(line.startswith("device ") for line in lines) == 2 * 4
    (found,) = re.findall(
        r"^measured ([\d.]+) ms, predicted ([\d.]+) ms, ratio ([\d.]+) ",
        done.stdout,
        re.MULTILINE,
    )
    measured, predicted, ratio = map(float, found)
    # How fast this machine was says nothing; the three figures go together as they are rounded.
    half, half_of_ratio = 0.05, 0.0005
    assert predicted > 1
    assert (measured - half) / (predicted + half) - half_of_ratio <= ratio
    assert ratio <= (measured + half) / (predicted - half) + half_of_ratio
    assert imread(io.BytesIO((tmp_path / "pipeline.png").read_bytes()), format="png").ndim == 3
    assert all(len(line) <= 80 or "pipeline.png" in line for line in lines[at : at + 16])


def test_training_with_too_many_stages_ends_before_a_step(tmp_path: Path) -> None:
    done = train(tmp_path, "--set=execution.num_stages=9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "set execution.num_stages to at most 8" in done.stderr and "step " not in done.stdout
    few = train(tmp_path, "--cpu_devices=3")
    assert few.returncode == 1 and "Traceback" not in few.stderr
    assert "need 4 devices, but there are 3" in few.stderr
    assert "execution.num_stages to at most 3, or set --cpu_devices=4" in few.stderr
