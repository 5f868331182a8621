"""The Mesh-TensorFlow experiments: exact counts at all sizes, printed or not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tensorflow as tf

from tekso.framework import registry
from tekso.framework.context import StepContext
from tekso.framework.run.inspection import model_record, task_of
from tekso.framework.theta import Theta

PRINTED = {4096: 142_619_648, 8192: 218_117_120}


@pytest.mark.parametrize("d_ff", [4096 * 2**i for i in range(7)])
def test_counts_are_exact(d_ff: int) -> None:
    tree = registry.get(f"lm.one_billion_words.Dff{d_ff}")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    heads = d_ff // 1024
    a_layer = 4 * 1024 * 256 * heads + 2 * 1024 * d_ff + 2048
    assert total == 6 * a_layer + 1024 + 2 * 32_768 * 1024
    assert total == PRINTED.get(d_ff, total)


def test_word_lstm_counts_four_gates_projections_and_two_tables() -> None:
    tree = registry.get("lm.one_billion_words.LstmWord")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    units, size, words = 8192, 1024, 793_472
    a_layer = 4 * units * (size + size + 1) + units * size
    assert total == 2 * a_layer + 2 * words * size + words


@pytest.mark.parametrize(
    ("name", "small"),
    [
        (
            "Dff4096",
            {
                "task.model.dim": 8,
                "task.model.stack.num_layers": 1,
                "task.model.stack.layer.attention.head_dim": 4,
                "task.model.stack.layer.feed_forward.hidden_dim": 10,
                "input.tokenizer.vocab_size": 300,
            },
        ),
        (
            "LstmWord",
            {
                "task.model.vocab_size": 40,
                "task.model.embedding_dim": 8,
                "task.model.stack.cell.hidden_dim": 10,
                "task.model.stack.cell.projection_dim": 8,
                "task.model.softmax.num_samples": 20,
                "input.tokenizer.vocab_size": 40,
            },
        ),
    ],
)
def test_small_forms_learn_from_sentences(name: str, small: dict[str, int], tmp_path: Path) -> None:
    sentences = tmp_path / "news.txt"
    sentences.write_text("".join(f"the {i % 30} th word of the day is {i} .\n" for i in range(200)))
    tree = registry.get(f"lm.one_billion_words.{name}")().tree()
    tree.set({**small, "input.files": str(sentences), "input.batch_size": 4, "input.length": 16})
    given = {"seed": 0, "assets_dir": str(tmp_path / "assets")}
    train = tree.input.instantiate(**given)
    dev = tree.eval_inputs["dev"].instantiate(**given, train=tree.input)
    task = tree.task.owner.complete(tree.task, train).instantiate()
    theta = task.init(1)

    batch = {key: tf.constant(value) for key, value in train.batch(0).items()}

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
    assert mean == pytest.approx(math.log(train.vocab_size), rel=0.2)  # nothing is learned yet
