"""The commands of docs/multi_task.md, on small models."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

SHORT = ("--set", "run.decode_at_end=false", "--set", "run.checkpoint_every_steps=0")
SMALL = (
    *SHORT, "--set", "*.num_layers=1", "--set", "*.dim=16", "--set", "*.hidden_dim=16",
    "--set", "input.inputs.mt.corpus.num_pairs=1000", "--set", "task.tasks.mt.scoring.pairs=2",
    "--set", "eval_inputs.lm_dev.input.max_batches=1",
    "--set", "eval_inputs.mt_dev.input.max_batches=1",
)  # fmt: skip


def run(tmp_path: Path, module: str, *arguments: str) -> str:
    done = processes.run(["-m", f"tekso.tools.{module}", *arguments], cwd=tmp_path, merge=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
def test_two_tasks_are_trained_evaluated_decoded_and_one_is_distilled(tmp_path: Path) -> None:
    start = ["--model=multi.cldr_and_python.Shared", "--logdir=runs/shared", "--steps=4"]
    printed = run(tmp_path, "trainer", *start, *SMALL)
    assert "get no gradient" not in printed  # each task is checked on its own batch
    records = [json.loads(line) for line in (tmp_path / "runs/shared/metrics.jsonl").open()]
    assert {"lm/bits_per_byte", "lm/loss"} <= set(records[-2]) | set(records[-1])
    assert any("mt/bleu" in record for record in records)

    text = '["May 4, 2022"]'
    decode = ["--mode=decode", "--set", f"task.tasks.mt.decode={text}", "--format=json"]
    decode += ["--set", "task.tasks.lm.decode.max_new_tokens=4"]
    printed = run(tmp_path, "trainer", "--logdir=runs/shared", *decode)
    decoded = json.loads(printed[printed.index("{\n") : printed.rindex("}") + 1])
    assert {record["task"] for record in decoded["records"]} == {"lm", "mt"}
    (tmp_path / "test.en").write_text("May 4, 2022\n3 dogs\n")
    given = ["--logdir=runs/shared", "--task=mt", "--input=test.en", "--output=test.out"]
    run(tmp_path, "decode", *given)
    assert len((tmp_path / "test.out").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_student_starts_from_the_checkpoint_of_its_teacher(tmp_path: Path) -> None:
    short = [*SHORT, "--steps=2"]
    run(tmp_path, "trainer", "--model=image.digits.Cnn", "--logdir=runs/teacher", *short)
    teacher = ["--set", "run.warm_start.teacher.checkpoint=runs/teacher"]
    student = ["--model=multi.digits.Distilled", "--logdir=runs/student"]
    printed = run(tmp_path, "trainer", *student, *teacher, *short)
    assert "teacher_agreement" in printed
