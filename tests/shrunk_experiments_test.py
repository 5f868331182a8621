"""Every registered experiment, made small, trains to the numbers of one device, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compiled_steps
import numpy as np
import processes
import pytest
import shrunk_experiments
from shrunk_program import ALONE, COMPILED, EXECUTIONS, SPMD

PROGRAM = Path(__file__).with_name("shrunk_program.py")
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "executions.md"
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

WITH_OTHER_EXECUTIONS = (
    "lm.one_billion_words.MeshDff4096",
    "lm.python_source.TinyMesh",
    "lm.python_source.TinyMeshPipeline",
    "lm.python_source.TinyPipeline",
)
"""Experiments that have another execution than the first one of their group."""

COMBINES_GRADIENTS = {"multi.cldr_and_python.GradSign", "multi.cldr_and_python.PcGrad"}

OTHERS = [name for name in EXECUTIONS if name not in (ALONE, COMPILED)]

TRAINS_AS_SPMD = "lm.python_source.TinySpmdPipeline"

REPEATED = (
    "image.imagenet.ViTB16",
    "lm.benchmark.Small",
    "lm.gpipe.Layers3",
    "lm.gpt.B18",
    "lm.one_billion_words.Dff4096",
    "lm.python_source.Small",
    "lm.python_source.Tiny",
    "lm.text_files.Char",
    "mt.cldr.EnDe",
    "mt.cldr.Many",
    "mt.gpipe.T6H8192A16",
    "mt.text_files.Base",
    "mt.wmt14_en_de.Base",
    "mt.wmt14_en_fr.Dff2048",
)
"""Experiments that train as an SPMD pipeline if a stack of theirs is a RepeatedStack."""

REFUSED: dict[str, dict[str, str]] = {
    "pipeline": {
        "image.emoji.DualEncoder": "couples the examples of a batch",
        **dict.fromkeys(COMBINES_GRADIENTS, "needs the gradient of every task"),
    },
    SPMD: {
        **{
            key: "has no repeated stack|couples the examples of a batch"
            for key in GROUPS
            if key not in (TRAINS_AS_SPMD, *REPEATED)
        },
        **dict.fromkeys(COMBINES_GRADIENTS, "needs the gradient of every task"),
    },
}
REFUSED["stages on meshes"] = REFUSED["pipeline"]
"""{execution: {experiment: regular expression for the reason}}; all others train."""


NOT_RUN: dict[str, tuple[str, ...]] = {}
"""{execution: experiments that have no result yet, as new ones}; remove those that pass."""


def test_groups_cover_every_registered_experiment() -> None:
    assert sorted(shrunk_experiments.groups()) == sorted(GROUPS)
    assert sorted(shrunk_experiments.with_other_executions()) == sorted(WITH_OTHER_EXECUTIONS)


def test_the_document_lists_what_is_refused() -> None:
    assert table() in DOCUMENT.read_text(), f"the table should be\n{table()}"


def table() -> str:
    """Returns a row for every group: its experiments, and what comes of them."""
    names = {COMPILED: "compiled whole", "replicas": "`data_parallel`, 2 devices"}
    names |= {"mesh": "`mesh_sharded`"}
    names |= {"pipeline": "`pipelined`", "stages on meshes": "`pipelined`, stages on meshes"}
    names |= {SPMD: "`spmd_pipelined`"}
    lines = [
        f"| experiment | others | {' | '.join(names.values())} |",
        "|---|--:|---|---|---|---|---|---|",
    ]
    groups = shrunk_experiments.groups()
    for key in sorted(groups):
        cells = [cell(key, name) for name in names]
        lines.append(f"| `{key}` | {len(groups[key]) - 1} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(key: str, execution: str) -> str:
    """Returns what comes of an experiment under an execution."""
    if key in REFUSED.get(execution, {}):
        return "rejected"
    if key in NOT_RUN.get(execution, ()):
        return "not run"
    return "equal (repeated)" if execution == SPMD and key in REPEATED else "equal"


def results(key: str, executions: list[str], **job: Any) -> dict[str, Any]:
    """Returns {execution: what came out}; a process that ends early leaves some out."""
    job = {"key": key, "executions": executions, "dtype": "float32", "steps": 0, **job}
    done = processes.run([PROGRAM, json.dumps({"changes": {}, **job})], timeout=TIMEOUT_S)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    for name in executions:
        found.setdefault(name, {"crash": f"exit code {done.returncode}: {done.stderr[-3000:]}"})
    return found


def difference(key: str, execution: str, result: Any, alone: Any) -> str | None:
    """Returns how the result of an execution differs from what it should be."""
    reason = REFUSED.get(execution, {}).get(key)
    if "crash" in result or "crash" in alone:
        return result.get("crash") or alone["crash"]
    alone = result.get("alone", alone)
    if reason is not None or "refused" in result:
        said = result.get("refused", "it trained")
        return None if reason is not None and re.search(reason, said) else said
    found = []
    for one, other in zip(alone["steps"], result["steps"], strict=execution != COMPILED):
        for name, value in one.items():
            rel = 1e-5 if execution == COMPILED else 1e-3 if name == "gradient_norm" else 1e-4
            if other[name] != pytest.approx(value, rel=rel):
                found.append(f"{name} {value:.8g} is {other[name]:.8g}")
    if execution == COMPILED:
        found += compiled_steps.problems(key, result)
        for name, pair in alone["evaluation"].items():
            if result["evaluation"].get(name) != pytest.approx(pair, rel=1e-5, abs=1e-6):
                found.append(f"{name} {pair} is {result['evaluation'].get(name)}")
    return "; ".join(found) or None


def check(key: str, executions: list[str]) -> None:
    found = results(key, executions)
    for execution, result in found.items():
        assert difference(key, execution, result, found[ALONE]) is None, execution


@pytest.mark.matrix
@pytest.mark.parametrize("key", GROUPS)
def test_it_trains_as_on_one_device_or_is_refused(key: str) -> None:
    check(key, list(EXECUTIONS))


@pytest.mark.slow
def test_an_experiment_trains_as_on_one_device_under_every_execution() -> None:
    check(TRAINS_AS_SPMD, [ALONE, *OTHERS])


@pytest.mark.parametrize(
    "key",
    [
        "lm.python_source.Tiny",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("asr.prompts.Texts", "image.digits.Cnn")
        ),
    ],
)
def test_the_steps_of_some_experiments_compile_whole(key: str) -> None:
    check(key, [ALONE, COMPILED])


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "epsilon"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_all_executions_compute_in_16_bits(dtype: str, epsilon: float) -> None:
    key = TRAINS_AS_SPMD  # every execution trains it
    full = results(key, [ALONE])[ALONE]
    found = results(key, [ALONE, *OTHERS], dtype=dtype)
    alone = found[ALONE]["steps"]
    for execution, result in found.items():
        for one, other in zip(alone, result["steps"], strict=True):
            for name, value in one.items():
                assert other[name] == pytest.approx(value, rel=epsilon), (execution, name)
        # In float32, executions differ by less than 1e-6.
        loss = full["steps"][0]["loss"]
        assert result["steps"][0]["loss"] != pytest.approx(loss, rel=3e-6), execution


# framework/execution/classifier_test.py trains in bfloat16 on one device, and takes the same steps
# under every execution.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("key", "execution"), [("lm.python_source.Tiny", "mesh"), ("image.digits.Cnn", "pipeline")]
)
def test_a_model_learns_in_bfloat16_as_in_float32(key: str, execution: str) -> None:
    names = [ALONE, execution]
    job: Any = {"steps": 60, "changes": {"schedule.initial_value": 0.02}}
    full, half = (results(key, names, dtype=d, **job) for d in ("float32", "bfloat16"))
    for name in names:
        wanted, found = (np.array(each[name]["losses"]) for each in (full, half))
        assert wanted[-4:].mean() < 0.6 * wanted[:4].mean(), name  # of all four batches
        assert found[-4:].mean() == pytest.approx(wanted[-4:].mean(), rel=0.1), name
        assert found[0] != pytest.approx(wanted[0], rel=1e-6), name  # bfloat16 rounds
