"""Every registered experiment, made small, trains to the numbers of one device, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import processes
import pytest
import shrunk_experiments
import shrunk_program

PROGRAM = Path(__file__).with_name("shrunk_program.py")
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "executions.md"
ALONE = "one device"
TIMEOUT_S = 3600
"""AmoebaNet's first step takes a minute of CPU to trace on one device, and more elsewhere."""

GROUPS = (
    "asr.fillets.Czech",
    "asr.librispeech.ConformerL",
    "asr.librispeech.LasGraphemes",
    "asr.librispeech.LasWordPieces",
    "asr.prompts.Conformer",
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
    "image.unet.Shapes",
    "image.unet.Volumes",
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
    "multi.cldr_and_python.Adapters",
    "multi.cldr_and_python.ByData",
    "multi.cldr_and_python.GradSign",
    "multi.cldr_and_python.Lm",
    "multi.cldr_and_python.LoraByTask",
    "multi.cldr_and_python.Mt",
    "multi.cldr_and_python.PcGrad",
    "multi.cldr_and_python.Shared",
    "multi.digits.Distilled",
    "multi.digits.Student",
    "multi.digits_and_cldr.Shared",
    "multi.punctuator.WithTranslation",
    "multi.smart_reply.Docstrings",
)
"""The first experiment of every group that differs by more than sizes and rates."""

FIRST_OF_MODEL = (
    "asr.fillets.Czech",
    "asr.librispeech.ConformerL",
    "asr.librispeech.LasGraphemes",
    "asr.librispeech.LasWordPieces",
    "asr.prompts.Conformer",
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
    "multi.cldr_and_python.Shared",
    "multi.digits_and_cldr.Shared",
)
"""One group of every kind of model and of batch: these train under all executions."""

COMBINES_GRADIENTS = {"multi.cldr_and_python.GradSign", "multi.cldr_and_python.PcGrad"}

REFUSED = {
    "SPMD pipeline": (
        "has no repeated stack|couples the examples|needs the gradient of every task",
        set(GROUPS) - {"lm.python_source.TinySpmdPipeline"},
    ),
    **dict.fromkeys(
        ("pipeline", "stages on meshes"),
        (
            "couples the examples of a batch|needs the gradient of every task",
            {"image.emoji.DualEncoder", *COMBINES_GRADIENTS},
        ),
    ),
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


def trained(key: str, executions: list[str], dtype: str = "float32") -> dict[str, Any]:
    job = {"key": key, "executions": executions, "dtype": dtype}
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


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "epsilon"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_all_executions_compute_in_16_bits(dtype: str, epsilon: float) -> None:
    key = "lm.python_source.TinySpmdPipeline"  # every execution trains it
    (full,) = trained(key, [ALONE]).values()
    found = trained(key, list(shrunk_program.EXECUTIONS), dtype)
    alone = found[ALONE]["steps"]
    for execution, result in found.items():
        for one, other in zip(alone, result["steps"], strict=True):
            for name, value in one.items():
                assert other[name] == pytest.approx(value, rel=epsilon), (execution, name)
        # In float32, executions differ by less than 1e-6.
        loss = full["steps"][0]["loss"]
        assert result["steps"][0]["loss"] != pytest.approx(loss, rel=3e-6), execution
