"""What holds for every registered experiment, without data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tekso.framework import registry, schedules
from tekso.framework.execution.mesh import activations
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.params import Params
from tekso.framework.run import experiment_record, inspection

ENTRIES = {
    entry.key: entry
    for entry in registry.list_experiments()
    if entry.cls.__module__.startswith("tekso.")  # other tests of this process register more
}
NEEDS_DATA = {
    "asr.fillets.Czech": "task.model.vocab_size",
    "asr.fillets.Dutch": "task.model.vocab_size",
    "asr.fillets.DutchAndCzech": "task.model.vocab_size",
    "asr.prompts.Conformer": "task.model.vocab_size",
    "asr.prompts.Ctc": "task.model.vocab_size",
    "asr.prompts.Las": "task.model.vocab_size",
    "asr.prompts.Rnnt": "task.model.vocab_size",
    "asr.prompts.Texts": "task.model.vocab_size",
    "image.boxes.Ssd": "task.num_classes",  # the classes are the categories of the file
    "image.folders.ResNet": "task.num_classes",  # the classes are the folders
    "image.unet.Folders": "task.num_classes",  # the classes are named with the folder
    "lm.text_files.Char": "task.model.vocab_size",  # the alphabet is that of the text
}
"""{key: the size that only its data determines}."""

STORED = Path(__file__).with_name("stored")
"""What `make catalogue` wrote about every experiment."""

DEEP = ("lm.gpipe.Layers1663", "image.imagenet.AmoebaNetDL72F512")
"""Experiments that take seconds to build, in the slow tests; the quick ones have smaller sizes."""

BETWEEN = {
    *(f"lm.one_billion_words.MeshDff{4096 * 2**i}" for i in range(1, 6)),
    *(f"mt.wmt14_en_fr.Dff{2048 * 2**i}" for i in range(1, 5)),
    *(f"mt.gpipe.{size}" for size in ("T12H16384A32", "T24H8192A16", "T32H16384A32")),
}
"""Experiments whose shards or stages the slow tests compare; the quick ones have the smallest and
the largest of the same model."""
AMOEBANET = "image.imagenet.AmoebaNet"
"""Such experiments that only `make test-matrix` compares; each takes 14 to 55 s of CPU time. The
slow tests of gpipe_tables_test.py trace one."""


def placed() -> list[Any]:
    """Returns the experiments whose stored descriptions have shards or stages."""
    described = sorted(path for path in STORED.iterdir() if _has_placement(path.read_text()))
    return [pytest.param(path.stem, marks=_marks(path.stem)) for path in described]


def _has_placement(described: str) -> bool:
    return _without_placement(described) != described


def _without_placement(described: str) -> str:
    """Returns a description as `text(…, placement=False)` writes it."""
    before, found, _ = described.partition(f"\n{experiment_record.PLACEMENT}\n")
    return before if found else described


def _marks(key: str) -> list[Any]:
    if key in DEEP or key in BETWEEN:
        return [pytest.mark.slow]
    return [pytest.mark.matrix] if key.startswith(AMOEBANET) else []


def test_the_experiments_that_are_promised_are_there() -> None:
    names = {
        "python_source": [
            *("Tiny", "TinyMesh", "TinyPipeline", "TinyMeshPipeline", "TinySpmdPipeline"),
            *("TinyMoe", "TinyLstm", "Small"),
        ],
        "text_files": ["Char", "Bytes", "SentencePiece"],
        "one_billion_words": [
            "LstmWord",
            *(f"{kind}{4096 * 2**i}" for i in range(7) for kind in ("Dff", "MeshDff")),
        ],
        "gpipe": [f"Layers{n}" for n in (3, 13, 103, 415, 1663)],
        "benchmark": ["Small", "Wide"],
    }
    promised = {f"lm.{module}.{name}" for module, found in names.items() for name in found}
    pairs = {
        "wmt14_en_de": ["Base", "Big"],
        "wmt14_en_fr": [f"Dff{2048 * 2**i}" for i in range(6)],
        "gpipe": ["T6H8192A16", "T12H16384A32", "T24H8192A16", "T32H16384A32", "T64H16384A32"],
    }
    images = {
        "boxes": ["Ssd"],
        "coco": ["Ssd300"],
        "digits": ["Mlp", "Cnn"],
        "fashion_mnist": ["ResNet"],
        "folders": ["ResNet"],
        "imagenet": [
            *("ResNet18", "ResNet50", "ResNet50Mlperf", "ResNet50Mlperf4096"),
            *(f"ViT{size}16" for size in ("Ti", "S", "B", "L")),
            *(f"AmoebaNetD{size}" for size in ("L18F208", "L18F416", "L18F544")),
            *("AmoebaNetDL36F544", "AmoebaNetDL72F512", "AmoebaNetBL18F512"),
        ],
        "pong": ["Ssd"],
        "trees": ["Ssd"],
        "unet": ["Digits", "Folders", "Shapes", "Volumes"],
    }
    promised |= {f"image.{module}.{name}" for module, found in images.items() for name in found}
    promised |= {f"mt.{module}.{name}" for module, found in pairs.items() for name in found}
    assert promised <= set(ENTRIES)
    assert any(key.startswith("lm.gpt.") for key in ENTRIES)


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=pytest.mark.slow) if k in DEEP else k for k in ENTRIES],
)
def key(request: pytest.FixtureRequest) -> Iterator[str]:
    """An experiment; its tests run one after the other, and build equal tasks once."""
    build = inspection.task_of
    built: dict[str, Any] = {}

    def build_once(tree: Any, **options: Any) -> Any:
        text = f"{tree.task.to_text()}{tree.input.to_text()}{options}"
        if text not in built:
            built[text] = build(tree, **options)
        return built[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "task_of", build_once)
        yield request.param


def test_its_parts_fit_together(key: str) -> None:
    tree = ENTRIES[key].cls().tree()
    assert ENTRIES[key].summary.endswith(".")

    again = Params.from_text(tree.to_text())
    assert again == tree
    run = tree.run.instantiate()
    tree.execution.instantiate()
    learner = schedules.end_with_run(tree.learner, run.params.steps).instantiate()
    if key in NEEDS_DATA:
        path = NEEDS_DATA[key]
        with pytest.raises(ValueError, match=f"{path} is not set"):
            inspection.task_of(tree)
        tree.set({path: experiment_record.SIZES_OF_DATA[path]})
    task = inspection.task_of(tree)
    specs = {path: spec for path, spec in task.specs().items() if spec.trainable}
    assert learner.slots(specs)  # every pattern of the learner matches some weight
    assert tree.freeze().is_frozen


def test_two_trees_share_nothing(key: str) -> None:
    first, second = ENTRIES[key].cls().tree(), ENTRIES[key].cls().tree()
    before = second.to_text()
    first.set({"run.steps": 7, "input.*batch_size": 7})
    if "dropout_rate" in before:
        first.set({"*dropout_rate": 0.7})
    assert second.to_text() == before == ENTRIES[key].cls().tree().to_text()


def test_its_params_and_weights_are_those_that_are_stored(key: str) -> None:
    stored = (STORED / f"{key}.txt").read_text()
    found = experiment_record.text(key, ENTRIES[key].cls().tree(), placement=False)
    assert found == _without_placement(stored), AGAIN


@pytest.fixture
def _one_layer_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes trace one layer of each stack: the others constrain tensors of the same shapes."""
    of_task = activations.of_task

    def of_few(task: Any, batch: Any, **options: Any) -> Any:
        few = task.params.copy()
        if "num_layers" in few.to_text():
            few.set({"*.num_layers": 1})
        return of_task(few.instantiate(), batch, **options)

    monkeypatch.setattr(activations, "of_task", of_few)


@pytest.mark.usefixtures("_one_layer_is_traced")
@pytest.mark.parametrize("placed_key", placed())
def test_its_shards_and_stages_are_those_that_are_stored(placed_key: str) -> None:
    stored = (STORED / f"{placed_key}.txt").read_text()
    assert experiment_record.text(placed_key, ENTRIES[placed_key].cls().tree()) == stored, AGAIN


def test_shards_and_stages_are_stored_of_every_experiment_that_has_them() -> None:
    described = {path.stem for path in STORED.iterdir() if _has_placement(path.read_text())}
    kinds = (MeshSharded, StagedExecution)
    assert described == {
        key for key, e in ENTRIES.items() if issubclass(e.cls().tree().execution.owner, kinds)
    }, AGAIN


def test_no_other_experiment_is_stored() -> None:
    assert {path.stem for path in STORED.iterdir()} == set(ENTRIES), AGAIN


AGAIN = "if this is intended, run `make catalogue` and look at the diff"
