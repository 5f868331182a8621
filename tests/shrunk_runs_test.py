"""Small experiments, made smaller, train two steps, save, restore, evaluate, decode and export."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).with_name("shrunk_run_program.py")

SLOW = (
    "image.digits.Mlp",
    "image.pong.Ssd",
    "image.unet.Digits",
    "lm.python_source.TinyLstm",
    "mt.cldr.EnDe",
)
"""An experiment of each of these kinds of tasks. Speech, several tasks, captions and volumes have
slow tests of commands in tests/params, which do not export all of them."""

OTHERS = (
    "asr.prompts.Ctc",
    "asr.prompts.Las",
    "asr.prompts.Rnnt",
    "image.digits.Cnn",
    "image.emoji.Caption",
    "image.fashion_mnist.ResNet",
    "lm.python_source.Small",
    "lm.python_source.Tiny",
    "lm.python_source.TinyMesh",
    "lm.python_source.TinyMeshPipeline",
    "lm.python_source.TinyMoe",
    "lm.python_source.TinyPipeline",
    "lm.python_source.TinySpmdPipeline",
    "lm.text_files.Char",
    "mt.cldr.EnDeLstm",
    "mt.cldr.Many",
    "mt.text_files.Lstm",
)


@pytest.mark.parametrize(
    "key",
    [
        *(pytest.param(key, marks=pytest.mark.slow) for key in SLOW),
        *(pytest.param(key, marks=pytest.mark.matrix) for key in OTHERS),
    ],
)
def test_a_small_experiment_goes_through_all_modes(key: str, tmp_path: Path) -> None:
    done = processes.run([PROGRAM, key, str(tmp_path)], timeout=900)
    words = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, words
    assert (tmp_path / "export" / "saved_model.pb").is_file()
    assert "resuming from" in done.stdout, words
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {(r["step"], r["split"]) for r in steps if "loss" in r} >= {(2, "train"), (2, "dev")}
    assert (tmp_path / "evaluations.jsonl").read_text().strip()
    decoded = done.stdout.partition("== --mode=decode")[2].partition("\n")[2]
    assert decoded.partition("== --mode=export")[0].strip()
