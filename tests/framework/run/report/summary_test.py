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
    decoding = """task.decode.prompts=["It's"]"""
    lines = summary.next_commands(Logdir("run"), 5, decoding=decoding)
    assert shlex.split(lines[1]) == [
        *shlex.split(trainer), "--logdir=run", "--mode=decode", "--set", decoding,
    ]  # fmt: skip
