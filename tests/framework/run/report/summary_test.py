"""The summary at the end of a run: results, places of files, next commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from report_values import VALUES

from tekso.framework.commands import typed
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report import summary


def test_the_summary_compares_says_where_things_lie_and_what_to_type(tmp_path: Path) -> None:
    lines = summary.finished(
        steps=2000, seconds=118.0, evaluations={"dev": VALUES, "longer": {"loss": 2.0}},
        references={"dev": {"gzip": 1.9812, "xz": 1.7034}},
    )  # fmt: skip
    text = "\n".join(lines)
    assert "2000 steps, 1m58s" in text and "gzip 1.9812, xz 1.7034" in text
    logdir = Logdir(f"{tmp_path}/a run/")
    assert "samples" not in "\n".join(summary.places(logdir, newest=2000, best=None))
    logdir.write("samples.txt", "one\n")
    text = "\n".join(summary.places(logdir, newest=2000, best=1600))
    for name in ("checkpoints", "metrics.jsonl", "curves.png", "samples.txt", "params.txt"):
        assert f"{tmp_path}/a run/{name}" in text
    assert "the newest at step 2000, the best at step 1600" in text
    trainer = typed("tekso-trainer")
    text = "\n".join(summary.next_commands(logdir, 2000, imports=["mine"]))
    assert f"{trainer} --import=mine '--logdir={tmp_path}/a run' --steps=4000" in text
    assert "--set" not in text
    few = summary.next_commands(Logdir("run"), 5, evaluates=False, decodes=False)
    assert [line.split("--logdir=run")[1] for line in few[1:]] == [" --steps=100", ""]
    ended = summary.next_commands(
        Logdir("run"), 15, evaluates=False, decodes=False, ended_early=True
    )
    assert [line.split("--logdir=run")[1] for line in ended[1:]] == [
        " --set run.early_stopping.patience=0", "",
    ]  # fmt: skip
    better = summary.next_commands(Logdir("run"), 15, best=10)
    assert [line.split("--logdir=run")[1] for line in better[1:]] == [
        " --mode=decode --checkpoint=best", " --mode=eval --checkpoint=best", " --steps=100", "",
    ]  # fmt: skip
    two = summary.next_commands(Logdir("run"), 15, cpu_devices=2)
    assert [line.split("--logdir=run")[1] for line in two[1:]] == [
        " --cpu_devices=2 --mode=decode", " --cpu_devices=2 --mode=eval",
        " --cpu_devices=2 --steps=100", "",
    ]  # fmt: skip
    assert "best" not in " ".join(summary.next_commands(Logdir("run"), 15, best=15))
    decoding = """task.decode.prompts=["It's"]"""
    lines = summary.next_commands(Logdir("run"), 5, decoding=decoding)
    assert shlex.split(lines[1]) == [
        *shlex.split(trainer), "--logdir=run", "--mode=decode", "--set", decoding,
    ]  # fmt: skip


def test_the_summary_has_all_metrics_of_a_task_in_lines_of_limited_width() -> None:
    recalls = {f"recall_{name}": 0.5 for name in ("barolo", "grignolino", "barbera", "others")}
    values = {"loss": 0.25, "accuracy": 0.5, **recalls, "macro_recall": 0.75}
    lines = summary.finished(steps=200, seconds=3.0, evaluations={"dev": values}, references={})
    assert lines[2:] == [
        "  dev  loss 0.2500  accuracy 0.5000  recall_barolo 0.5000",
        "      recall_grignolino 0.5000  recall_barbera 0.5000  recall_others 0.5000",
        "      macro_recall 0.7500",
    ]
    many = {"loss": 0.25, **{f"task_{i}": 0.5 for i in range(20)}}
    lines = summary.finished(steps=200, seconds=3.0, evaluations={"dev": many}, references={})
    text = " ".join(lines)
    assert "task_11 0.5000" in text and "task_12" not in text
    assert text.endswith("and 8 more, which --mode=eval prints")
