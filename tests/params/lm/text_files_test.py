"""Experiments on any text: one setting is enough, and the small GPT has the published size."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import registry
from tekso.framework.context import StepContext
from tekso.framework.run import inspection

TEXT = "".join(f"{i} bottles of beer on the wall, take one down, ¡salud!\n" for i in range(300))


def test_char_has_the_size_of_the_small_gpt() -> None:
    tree = registry.get("lm.text_files.Char")().tree()
    tree.task.model.vocab_size = 65  # Tiny Shakespeare
    record = inspection.model_record("", inspection.task_of(tree))
    positions = sum(w["size"] for w in record["weights"] if "positions" in w["path"])
    # nanoGPT prints "number of parameters: 0.80M" for 4 layers of width 128, without positions.
    d = 128
    assert record["total_weights"] - positions == 4 * (12 * d * d + 2 * d) + d + 65 * d
    assert round((record["total_weights"] - positions) / 1e6, 2) == 0.8
    assert positions == 64 * d


@pytest.mark.parametrize("name", ["Char", "Bytes", "SentencePiece"])
def test_files_reach_training_and_evaluation(name: str, tmp_path: Path) -> None:
    (tmp_path / "beer.txt").write_text(TEXT)
    tree = registry.get(f"lm.text_files.{name}")().tree()
    tree.set_text("input.files", str(tmp_path / "*.txt"))
    if name == "SentencePiece":
        tree.set_text("input.tokenizer.vocab_size", "320")
    given = {"seed": 0, "assets_dir": str(tmp_path / "assets")}
    train = tree.input.instantiate(**given)
    dev = tree.eval_inputs["dev"].instantiate(**given, train=tree.input)

    text = "".join(train.texts()) + "".join(dev.inner.texts())
    assert text == TEXT
    assert len("".join(dev.inner.texts())) == pytest.approx(0.1 * len(TEXT), abs=1)

    task = tree.task.owner.complete(tree.task, train).instantiate()
    assert task.specs()["model/embedding/table"].shape[0] == train.vocab_size
    batch = {key: tf.constant(value) for key, value in dev.batch(0).items()}
    sums = task.loss(task.init(1), batch, StepContext())
    loss = float(sums.loss_sum) / float(task.loss_weight(batch))
    assert loss == pytest.approx(math.log(train.vocab_size), rel=0.15)  # nothing is learned yet
    num_bytes = sum(int(dev.batch(i)["num_bytes"].sum()) for i in range(dev.num_batches))
    assert num_bytes == len("".join(dev.inner.texts()).encode())


def test_without_files_it_says_what_to_set(tmp_path: Path) -> None:
    tree = registry.get("lm.text_files.Char")().tree()
    with pytest.raises(ValueError, match=r"--set input\.corpus\.files="):
        tree.input.instantiate(seed=0, assets_dir=str(tmp_path))


def test_projections_into_the_residual_start_smaller() -> None:
    tree = registry.get("lm.text_files.Char")().tree()
    tree.task.model.vocab_size = 65
    specs = inspection.task_of(tree).specs()
    layer = "model/stack/layers/0"
    for path, stddev in {
        f"{layer}/attention/q": 0.02,
        f"{layer}/attention/out": 0.02 / math.sqrt(8),
        f"{layer}/feed_forward/hidden/w": 0.02,
        f"{layer}/feed_forward/output/w": 0.02 / math.sqrt(8),
        "model/embedding/table": 0.02,
        "model/positions/w": 0.02,
    }.items():
        assert np.std(specs[path].initial_value(0)) == pytest.approx(stddev, rel=0.05), path


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"input.files": "nosuch/*.txt"}, "input.files: nothing matches 'nosuch/\\*.txt'"),
        ({"input.corpus.files": "nosuch.txt"}, "input.corpus.files: nothing matches"),
        ({"input.corpus.dev_files": "nosuch.txt"}, "input.corpus.dev_files: nothing matches"),
        ({}, "input.corpus.files is empty"),
        ({"input.length": "0"}, "input.length is 0"),
        ({"input.length": "100_000"}, "set input.length below 1"),
        ({"input.overlap": "64"}, "input.overlap is 64"),
        ({"input.batch_size": "0"}, "input.batch_size is 0"),
        ({"input.tokenizer.vocab_size": "5"}, "input.tokenizer.vocab_size is 5"),
        ({"input.corpus.dev_fraction": "3"}, "input.corpus.dev_fraction is 3.0"),
        ({"input.corpus.max_skipped": "-1"}, "input.corpus.max_skipped is -1"),
        ({"eval_inputs.dev.batch_size": "0"}, "eval_inputs.dev.batch_size is 0"),
        ({"eval_inputs.dev.max_batches": "0"}, "eval_inputs.dev.max_batches is 0"),
    ],
)
def test_what_is_wrong_with_an_input_is_reported_with_its_path(
    settings: dict[str, str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "beer.txt").write_text(TEXT)
    tree = registry.get("lm.text_files.Char")().tree()
    if settings and "input.corpus.files" not in settings:
        tree.input.files = str(tmp_path / "beer.txt")
    for path, value in settings.items():
        tree.set_text(path, value)
    with pytest.raises((ValueError, OSError), match=expected):
        tree.input.instantiate()
        tree.eval_inputs["dev"].instantiate(train=tree.input)
