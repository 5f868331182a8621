"""Small experiments, made smaller, train two steps, save, restore, evaluate, decode and export."""

from __future__ import annotations

import json
import os
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).with_name("shrunk_run_program.py")

SLOW = (
    ("image.digits.Mlp", "image.digits.Cnn", "image.pong.Ssd", "image.unet.Digits"),
    ("lm.python_source.TinyLstm", "lm.text_files.Char", "mt.cldr.EnDe"),
)
"""Experiments of these kinds of tasks; one process runs each group. Speech, several tasks, captions
and volumes have slow tests of commands in tests/params, which do not export all of them."""

OTHERS = (
    "asr.prompts.Ctc",
    "asr.prompts.Las",
    "asr.prompts.Rnnt",
    "image.emoji.Caption",
    "image.fashion_mnist.ResNet",
    "lm.python_source.Small",
    "lm.python_source.Tiny",
    "lm.python_source.TinyMesh",
    "lm.python_source.TinyMeshPipeline",
    "lm.python_source.TinyMoe",
    "lm.python_source.TinyPipeline",
    "lm.python_source.TinySpmdPipeline",
    "mt.cldr.EnDeLstm",
    "mt.cldr.Many",
    "mt.text_files.Lstm",
)


@pytest.mark.parametrize(
    "keys",
    [
        *(pytest.param(keys, marks=pytest.mark.slow, id=keys[0]) for keys in SLOW),
        *(pytest.param((key,), marks=pytest.mark.matrix, id=key) for key in OTHERS),
    ],
)
def test_small_experiments_go_through_all_modes(keys: tuple[str, ...], tmp_path: Path) -> None:
    env = {**os.environ, **processes.GRAPH_OPTIMIZER_OFF}
    done = processes.run([PROGRAM, *keys, str(tmp_path)], env=env, timeout=900)
    words = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, words
    output = done.stdout
    for key in keys:
        own, end, output = output.partition(f"== {key}: done")
        assert end, words
        _check(tmp_path / key, own)


def _check(logdir: Path, output: str) -> None:
    """Checks the files and the output of the modes of an experiment."""
    assert (logdir / "export" / "saved_model.pb").is_file()
    assert "resuming from" in output
    steps = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    assert {(r["step"], r["split"]) for r in steps if "loss" in r} >= {(2, "train"), (2, "dev")}
    assert (logdir / "evaluations.jsonl").read_text().strip()
    decoded = output.partition("== --mode=decode")[2].partition("\n")[2]
    assert decoded.partition("== --mode=export")[0].strip()
