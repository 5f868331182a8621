"""Every registered experiment, made small, trains to the numbers of one device, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import processes
import pytest
import shrunk_experiments

PROGRAM = Path(__file__).with_name("shrunk_program.py")
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "executions.md"
ALONE = "one device"
TIMEOUT_S = 3600
"""AmoebaNet's first step takes a minute of CPU to trace on one device, and more elsewhere."""

GROUPS = (
    "asr.librispeech.ConformerL",
    "asr.librispeech.LasGraphemes",
    "asr.librispeech.LasWordPieces",
    "asr.prompts.Ctc",
    "asr.prompts.Las",
    "asr.prompts.Rnnt",
    "asr.prompts.Texts",
    "image.boxes.Ssd",
    "image.coco.Captions",
    "image.coco.Ssd300",
    "image.digits.Cnn",
    "image.digits.Mlp",
    "image.emoji.Caption",
    "image.emoji.DualEncoder",
    "image.fashion_mnist.ResNet",
    "image.folders.ResNet",
    "image.glyphs.ResNet",
    "image.imagenet.AmoebaNetBL18F512",
    "image.imagenet.AmoebaNetDL18F208",
    "image.imagenet.ResNet18",
    "image.imagenet.ResNet50",
    "image.imagenet.ResNet50Mlperf",
    "image.imagenet.ViTB16",
    "image.pong.Ssd",
    "image.unet.Digits",
    "image.unet.Folders",
    "lm.benchmark.Small",
    "lm.gpipe.Layers3",
    "lm.gpt.B18",
    "lm.one_billion_words.Dff4096",
    "lm.one_billion_words.LstmWord",
    "lm.python_source.Small",
    "lm.python_source.Tiny",
    "lm.python_source.TinyLstm",
    "lm.python_source.TinyMoe",
    "lm.python_source.TinySpmdPipeline",
    "lm.text_files.Char",
    "mt.cldr.EnDe",
    "mt.cldr.EnDeLstm",
    "mt.cldr.Many",
    "mt.gpipe.T6H8192A16",
    "mt.text_files.Base",
    "mt.text_files.Lstm",
    "mt.wmt14_en_de.Base",
    "mt.wmt14_en_fr.Dff2048",
)
"""The first experiment of every group that differs by more than sizes and rates."""

FIRST_OF_MODEL = (
    "asr.librispeech.ConformerL",
    "asr.librispeech.LasGraphemes",
    "asr.librispeech.LasWordPieces",
    "asr.prompts.Ctc",
    "asr.prompts.Las",
    "asr.prompts.Rnnt",
    "asr.prompts.Las",
    "asr.prompts.Rnnt",
    "image.digits.Cnn",
    "image.digits.Mlp",
    "image.emoji.Caption",
    "image.emoji.DualEncoder",
    "image.imagenet.ViTB16",
    "image.pong.Ssd",
    "image.unet.Digits",
    "lm.python_source.Tiny",
    "lm.python_source.TinyLstm",
    "lm.python_source.TinyMoe",
    "lm.python_source.TinySpmdPipeline",
    "mt.cldr.EnDe",
    "mt.cldr.EnDeLstm",
    "mt.gpipe.T6H8192A16",
)
"""One group of every kind of model and of batch: these train under all executions."""

REFUSED = {
    "SPMD pipeline": (
        "has no repeated stack|couples the examples",
        set(GROUPS) - {"lm.python_source.TinySpmdPipeline"},
    ),
    "pipeline": ("couples the examples of a batch", {"image.emoji.DualEncoder"}),
    "stages on meshes": ("couples the examples of a batch", {"image.emoji.DualEncoder"}),
}
"""{execution: (regular expression for the reason, the groups that it refuses)}; others train."""


def test_groups_cover_every_registered_experiment() -> None:
    assert sorted(shrunk_experiments.groups()) == sorted(GROUPS)


def test_the_document_lists_what_is_refused() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    assert set(REFUSED) == {"SPMD pipeline", "pipeline", "stages on meshes"}
    refused = REFUSED["pipeline"][1] | REFUSED["stages on meshes"][1]
    for key in refused:
        assert [row for row in rows if row.startswith(f"| `pipelined` | `{key}` |")]
    (trains,) = set(GROUPS) - REFUSED["SPMD pipeline"][1]
    assert [
        r for r in rows if r.startswith(f"| `spmd_pipelined` | every experiment except `{trains}`")
    ]


def trained(key: str, executions: list[str]) -> dict[str, Any]:
    job = {"key": key, "executions": executions}
    done = processes.run([PROGRAM, json.dumps(job)], timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


SLOW = ("lm.python_source.TinySpmdPipeline", "mt.text_files.Lstm")
"""The groups that the slow tests train; `make test-matrix` trains the others."""


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=pytest.mark.slow if key in SLOW else pytest.mark.matrix)
        for key in GROUPS
    ],
)
def test_it_trains_as_on_one_device_or_is_refused(key: str) -> None:
    more = ["stages on meshes", "replicas"] if key in FIRST_OF_MODEL else []
    found = trained(key, [ALONE, "mesh", "pipeline", "SPMD pipeline", *more])
    alone = found.pop(ALONE)["steps"]
    for execution, result in found.items():
        reason, refused = REFUSED.get(execution, ("", set()))
        if key in refused:
            assert re.search(reason, result["refused"])
            continue
        assert "refused" not in result, (execution, result)
        for one, other in zip(alone, result["steps"], strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-4), execution
            norm = pytest.approx(one["gradient_norm"], rel=1e-3)
            assert other["gradient_norm"] == norm, execution
