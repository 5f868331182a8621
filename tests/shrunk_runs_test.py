"""Small experiments, made smaller, train two steps, save, restore, evaluate, decode and export.

A new experiment runs here by itself: in `make test-all`, unless it is in the table below.
`shrunk_experiments_test` compares the names with the registry.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import processes
import pytest
from shrunk_experiments import NOTHING_DECODED, NOTHING_EVALUATED
from shrunk_experiments_test import GROUPS, WITH_OTHER_EXECUTIONS

PROGRAM = Path(__file__).with_name("shrunk_run_program.py")

MATRIX = {
    "asr.librispeech.ConformerL": "asr.prompts.Conformer",
    "asr.librispeech.LasGraphemes": "asr.prompts.Las",
    "asr.librispeech.LasWordPieces": "asr.prompts.Las",
    "image.coco.Captions": "image.emoji.Caption",
    "image.coco.Ssd300": "image.pong.Ssd",
    "image.folders.ResNet": "image.fashion_mnist.ResNet",
    "image.imagenet.AmoebaNetBL18F512": "image.fashion_mnist.ResNet",
    "image.imagenet.AmoebaNetDL18F208": "image.fashion_mnist.ResNet",
    "image.imagenet.ResNet18": "image.fashion_mnist.ResNet",
    "image.imagenet.ResNet50": "image.fashion_mnist.ResNet",
    "image.imagenet.ResNet50Mlperf": "image.fashion_mnist.ResNet",
    "image.imagenet.ViTB16": "image.fashion_mnist.ResNet",
    "image.unet.Folders": "image.unet.Digits",
    "lm.gpipe.Layers3": "lm.python_source.TinyPipeline",
    "lm.gpt.B18": "lm.python_source.Tiny",
    "lm.one_billion_words.Dff4096": "lm.python_source.Tiny",
    "lm.one_billion_words.LstmWord": "lm.python_source.TinyLstm",
    "lm.one_billion_words.MeshDff4096": "lm.python_source.TinyMesh",
    "mt.gpipe.T6H8192A16": "mt.cldr.EnDe",
    "mt.wmt14_en_de.Base": "mt.cldr.EnDe",
    "mt.wmt14_en_fr.Dff2048": "mt.cldr.EnDe",
}
"""{an experiment that runs in `make test-matrix` only: one of the same task that also runs in
`make test-all`}. These are not small, until they are made so."""

OP_BY_OP = (
    "asr.fillets.Czech",
    "asr.prompts.Conformer",
    "asr.prompts.Las",
    "asr.prompts.Rnnt",
    "image.boxes.Ssd",
    "image.emoji.Caption",
    "image.emoji.DualEncoder",
    "image.glyphs.ResNet",
    "image.unet.Shapes",
    "image.unet.Volumes",
    "lm.benchmark.Small",
    "lm.python_source.Small",
    "lm.python_source.TinyLstm",
    "lm.python_source.TinyMoe",
    "lm.text_files.Char",
    "mt.cldr.EnDeLstm",
    "mt.cldr.Many",
    "mt.text_files.Base",
    "mt.text_files.Lstm",
    "multi.cldr_and_python.Adapters",
    "multi.cldr_and_python.ByData",
    "multi.cldr_and_python.GradSign",
    "multi.cldr_and_python.Lm",
    "multi.cldr_and_python.LoraByTask",
    "multi.cldr_and_python.Mt",
    "multi.cldr_and_python.PcGrad",
    "multi.cldr_and_python.Shared",
    "multi.digits.Student",
    "multi.digits_and_cldr.Shared",
    "multi.punctuator.WithTranslation",
    "multi.smart_reply.Docstrings",
)
"""Experiments whose first step is traced in `make test-matrix` only, because they resemble another
experiment, or because tracing takes much longer than the steps. In `make test-all`, it runs op by
op."""

KEYS = (*GROUPS, *WITH_OTHER_EXECUTIONS)


def by_module(keys: Iterable[str]) -> list[list[str]]:
    """Returns experiments by module; one process runs a module, as imports take CPU time, too.

    Those that need several devices come first, because TensorFlow starts with their number.
    """
    keys = sorted(keys, key=lambda key: (_module(key), key not in WITH_OTHER_EXECUTIONS, key))
    grouped = itertools.groupby(keys, key=_module)
    return [list(group) for _, group in grouped]


def _module(key: str) -> str:
    return key.rpartition(".")[0]


TRACED = by_module(set(KEYS) - {*MATRIX, *OP_BY_OP})


def test_exceptions_are_experiments_and_resemble_one_that_runs() -> None:
    assert {*KEYS} >= {*MATRIX, *OP_BY_OP, *NOTHING_DECODED, *NOTHING_EVALUATED}
    assert {*MATRIX.values()} <= {*KEYS} - {*MATRIX}


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        *(pytest.param(keys, [], marks=pytest.mark.slow, id=keys[0]) for keys in TRACED),
        *(
            pytest.param(keys, ["--op_by_op"], marks=pytest.mark.slow, id=f"{keys[0]}, op by op")
            for keys in by_module(OP_BY_OP)
        ),
        *(
            pytest.param([key], [], marks=pytest.mark.matrix, id=key)
            for key in (*MATRIX, *OP_BY_OP)
        ),
    ],
)
def test_small_experiments_go_through_all_modes(
    keys: list[str], flags: list[str], tmp_path: Path
) -> None:
    done = processes.run([PROGRAM, *flags, *keys, str(tmp_path)], optimized=False, timeout=900)
    words = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert done.returncode == 0, words
    output = done.stdout
    for key in keys:
        own, end, output = output.partition(f"== {key}: done")
        assert end, words
        _check(
            tmp_path / key,
            own,
            evaluates=key not in NOTHING_EVALUATED,
            decodes=key not in NOTHING_DECODED,
        )


@pytest.mark.slow
def test_a_trainer_in_separate_processes_goes_through_all_modes(tmp_path: Path) -> None:
    model = ["--model=image.digits.Mlp", f"--logdir={tmp_path}"]
    small = ["--set=execution.xla=none", "--set=execution.towers=1"]
    output = ""
    for words in (
        [*model, "--steps=1", *small],
        [*model, "--steps=2", *small],
        ["--mode=eval", *model],
        ["--mode=decode", *model],
        ["--mode=export", *model],
        ["-c", LOADER, str(tmp_path / "export")],
    ):
        program = [] if words[0] == "-c" else ["-m", "tekso.tools.trainer"]
        done = processes.run([*program, *words], optimized=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        output += f"== {' '.join(words)}\n{done.stdout}"
    _check(tmp_path, output, evaluates=True, decodes=True)


LOADER = """
import sys
import numpy as np
import tensorflow as tf

for name, function in tf.saved_model.load(sys.argv[1]).signatures.items():
    _, inputs = function.structured_input_signature
    found = function(**{n: tf.ones([2, *s.shape[1:]], s.dtype) for n, s in inputs.items()})
    assert all(np.isfinite(value).all() and len(value) == 2 for value in found.values()), found
    print("== called", name)
"""


def _check(logdir: Path, output: str, *, evaluates: bool, decodes: bool) -> None:
    """Checks the files and the output of the modes of an experiment."""
    assert "== called " in output
    assert (logdir / "export" / "saved_model.pb").is_file()
    assert "resuming from" in output
    assert "results of program.call are zeros" not in output  # the trial of decode
    steps = _records(logdir / "metrics.jsonl")
    assert {(r["step"], r["split"]) for r in steps if "loss" in r} >= {(1, "train"), (2, "train")}
    assert any(r["step"] == 2 and r["split"] != "train" for r in steps) == evaluates
    evaluations = logdir / "evaluations.jsonl"
    assert evaluations.exists() == evaluates
    if evaluates:
        _check_evaluations(steps, _records(evaluations))
    decoded = output.partition("== --mode=decode")[2].partition("\n")[2]
    assert bool(decoded.partition("== --mode=export")[0].strip()) == decodes


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _check_evaluations(steps: list[dict[str, Any]], restored: list[dict[str, Any]]) -> None:
    """Checks that --mode=eval found what training did, with the weights that it restored."""
    trained = {r["split"]: r for r in steps if r["step"] == 2 and r["split"] != "train"}
    assert {r["split"] for r in restored} == set(trained)
    for record in restored:
        for name, value in trained[record["split"]].items():
            if isinstance(value, float) and not name.endswith("seconds"):
                assert record[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
