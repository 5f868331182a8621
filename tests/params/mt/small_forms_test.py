"""Small forms of the translation experiments take a step on pairs of sentences from files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import registry
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.tasks.mt.pair_files import Tsv

WORDS = {"de": ("das", "Wort", "ist"), "fr": ("le", "mot", "est")}


def write_pairs(path: Path) -> None:
    lines = []
    for i in range(200):
        language = ("de", "fr")[i % 2]
        a, b, c = WORDS[language]
        lines.append(f"the {i % 30} th word is {i}\t{a} {i % 30} . {b} {c} {i}\t{language}\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("name", "languages"),
    [("wmt14_en_de.Base", []), ("wmt14_en_fr.Dff2048", []), ("gpipe.T6H8192A16", ["de", "fr"])],
)
def test_small_forms_learn_from_pairs(name: str, languages: list[str], tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    tree = registry.get(f"mt.{name}")().tree()
    corpus = Tsv.Params(files=str(tmp_path / "pairs.tsv"), languages=languages)
    corpus.language_column = 2 if languages else None
    small: dict[str, Any] = {
        "task.model.dim": 8,
        "task.model.*num_layers": 1,
        "task.model.*num_heads": 2,
        "task.model.*head_dim": 4,
        "task.model.*hidden_dim": 10,
        "input.corpus": corpus,
        "input.tokenizer.vocab_size": 300,
        "input.batch_size": 4,
        "input.source_length": 40,
        "input.target_length": 44,
    }
    tree.set(small)
    given = {"seed": 0, "assets_dir": str(tmp_path / "assets")}
    train = tree.input.instantiate(**given)
    dev = tree.eval_inputs["dev"].instantiate(**given, train=tree.input)
    task = tree.task.owner.complete(tree.task, train).instantiate()
    theta = task.init(1)

    batch = {key: tf.constant(value) for key, value in train.batch(0).items()}
    assert batch["source_segment_ids"].numpy().max() > 1  # packed

    def loss(theta: Theta) -> tf.Tensor:  # of the same masks and samples each time
        return task.loss(theta, batch, StepContext(mode="train")).loss_sum

    weights = tf.nest.flatten(theta)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        before = loss(theta)
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(before, weights)]
    slope = sum(float(tf.reduce_sum(tf.square(g))) for g in gradients)
    rate = 1e-3 * float(before) / slope  # so that the loss falls by a thousandth, where straight
    moved = [w - rate * g for w, g in zip(weights, gradients, strict=True)]
    after = loss(tf.nest.pack_sequence_as(theta, moved))
    assert 1 - float(after / before) == pytest.approx(1e-3, rel=0.1)  # for the curvature

    held_out = {key: tf.constant(value) for key, value in dev.batch(0).items()}
    sums = task.loss(theta, held_out, StepContext())
    mean = float(sums.loss_sum) / float(task.loss_weight(held_out))
    assert train.target_vocab_size == 300 + len(languages)
    assert mean == pytest.approx(math.log(300), rel=0.25)  # nothing is learned yet
