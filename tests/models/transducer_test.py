"""The transducer: blocks of the joint network change nothing, and padding has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.transducer_layers import Joint, PredictionNetwork
from tekso.models.transducer_loss import lattice_loss, transducer_loss

RNG = np.random.default_rng(4)
ENCODED = tf.constant(RNG.normal(0, 1, (2, 7, 5)), tf.float32)
PREDICTED = tf.constant(RNG.normal(0, 1, (2, 4, 3)), tf.float32)
LABELS = tf.constant([[1, 0, 5], [2, 2, 0]])
LENGTHS = {"num_frames": tf.constant([7, 5]), "num_labels": tf.constant([3, 2])}


def joint(block_frames: int) -> Joint:
    layer: Joint = Joint.Params(
        vocab_size=6, encoded_dim=5, predicted_dim=3, dim=8, block_frames=block_frames
    ).instantiate()
    return layer


def with_gradients(function: Any, theta: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    inputs = [*tf.nest.flatten(theta), ENCODED, PREDICTED]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        nats = function(theta)
    return nats, tape.gradient(nats, inputs)


@pytest.mark.parametrize(("block_frames", "graph"), [(3, True), (7, False), (100, True), (1, True)])
def test_blocks_give_loss_and_gradients_of_all_scores_at_once(
    block_frames: int, graph: bool
) -> None:
    layer, ctx = joint(block_frames), StepContext()
    theta = layer.init(seed=1)

    def whole(theta: Any) -> tf.Tensor:
        hidden = tf.tanh(
            (ENCODED @ theta.encoded.w + theta.encoded.b)[:, :, None]
            + (PREDICTED @ theta.predicted.w)[:, None]
        )
        logits = tf.tensordot(hidden, theta.output.w, 1) + theta.output.b
        return transducer_loss(logits, LABELS, ctx, blank_id=6, **LENGTHS)

    def in_blocks(theta: Any) -> tf.Tensor:
        blank, label = layer.log_probs(theta, ENCODED, PREDICTED, LABELS, ctx)
        return lattice_loss(blank, label, ctx, **LENGTHS)

    def run(function: Any) -> Any:
        return with_gradients(function, theta)

    nats, gradients = run(whole)
    compiled = tf.function(run, autograph=False) if graph else run
    own_nats, own_gradients = compiled(in_blocks)
    np.testing.assert_allclose(own_nats, nats, rtol=1e-6)
    for own, other in zip(own_gradients, gradients, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-6)


def test_steps_of_the_prediction_network_equal_the_whole_sequence() -> None:
    network: PredictionNetwork = PredictionNetwork.Params(
        vocab_size=6, dim=4, stack=RecurrentStack.Params(num_layers=2).set(
            {"cell.hidden_dim": 5}
        ),
    ).instantiate()  # fmt: skip
    theta, ctx = network.init(seed=2), StepContext()
    whole = network.fprop(theta, LABELS, ctx)
    y, state = network.start(theta, 2, ctx)
    rows = [y]
    for u in range(3):
        y, state = network.step(theta, LABELS[:, u], state, ctx)
        rows.append(y)
    np.testing.assert_allclose(tf.stack(rows, 1), whole, atol=1e-6)
    with pytest.raises(ValueError, match="must be 'forward'"):
        PredictionNetwork.Params(
            vocab_size=6, stack=RecurrentStack.Params(num_layers=1, direction="bidirectional")
        ).instantiate()


@pytest.mark.slow
def test_memory_does_not_hold_the_scores_of_all_tokens() -> None:
    program = Path(__file__).with_name("transducer_memory_program.py")
    growth = {}
    for block_frames in (160, 4):
        done = processes.run([program, str(block_frames)])
        assert done.returncode == 0, done.stderr[-2000:]
        growth[block_frames] = float(done.stdout.split()[-1])
    # All scores at once are 128 MB, several times; 4 frames at once are 3 MB. What the threads
    # and kernels of a first step take (80 to 140 MB were seen) is in both.
    assert growth[160] > 300 and growth[4] < growth[160] / 3, growth
