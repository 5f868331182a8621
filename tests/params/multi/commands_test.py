"""The commands of docs/multi_task.md, on small models."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

SHORT = (
    "--set", "run.decode_at_end=false", "--set", "run.checkpoint_every_steps=0",
    "--set", "execution.towers=1", "--set", "execution.xla=none",
)  # fmt: skip
SMALL = (
    *SHORT, "--set", "*.num_layers=1", "--set", "*.dim=16", "--set", "*.hidden_dim=16",
    "--set", "input.inputs.mt.corpus.num_pairs=1000", "--set", "task.tasks.mt.scoring.pairs=2",
    "--set", "task.tasks.mt.translator.search.max_length=4",  # each token is computed op by op
    "--set", "eval_inputs.lm_dev.input.max_batches=1",
    "--set", "eval_inputs.mt_dev.input.max_batches=1",
)  # fmt: skip


def run(tmp_path: Path, module: str, *arguments: str) -> str:
    command = ["-m", f"tekso.tools.{module}", *arguments]
    exports = "--mode=export" in arguments
    done = processes.run(command, cwd=tmp_path, merge=True, optimized=False, op_by_op=not exports)
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


@pytest.mark.slow
def test_a_trigger_classifies_lines_and_is_exported(tmp_path: Path) -> None:
    many = (f'def f{i}(a):\n    """Return the number {i} of it."""\n' for i in range(80))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("".join(many) + "def g(): pass\n" * 9)
    roots = ["input.inputs.trigger.root=code", "input.inputs.reply.corpus.root=code"]
    settings = [
        *roots,
        "*.num_layers=1",
        "*.dim=16",
        "*.hidden_dim=16",
        "task.tasks.reply.scoring=None",
    ]
    start = ["--model=multi.smart_reply.Docstrings", "--logdir=runs/pair", "--steps=2"]
    run(tmp_path, "trainer", *start, *SHORT, *(f"--set={one}" for one in settings))
    (tmp_path / "messages.txt").write_text("a.f1(a)\n\na.g()\n" + "long" * 30 + "\n")
    given = ["--logdir=runs/pair", "--task=trigger", "--input=messages.txt"]
    printed = run(tmp_path, "decode", *given, "--output=classes.txt")
    assert "classified 4 lines" in printed and "1 of them are longer than 96 bytes" in printed
    rows = [line.split("\t") for line in (tmp_path / "classes.txt").read_text().splitlines()]
    assert len(rows) == 4 and {name for name, _ in rows} <= {"reply", "no reply"}
    assert all(0.5 <= float(probability) <= 1 for _, probability in rows)
    exported = ["--mode=export", "--export_lengths=96", "--output=out"]
    printed = run(tmp_path, "trainer", "--logdir=runs/pair", *exported)
    assert "trigger_classify(ids) -> probabilities, labels" in printed
    assert "trigger_classify(texts), with texts as inputs and outputs" in printed
    assert "and for texts:" in printed  # no package has to be imported
