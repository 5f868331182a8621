"""Prints by how many MB a step with the joint network's gradient raises the peak memory."""

from __future__ import annotations

import resource
import sys
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.transducer_layers import Joint
from tekso.models.transducer_loss import lattice_loss

BATCH, FRAMES, LABELS, TOKENS = 2, 160, 99, 1000


def peak_mb() -> float:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main(block_frames: int) -> None:
    """Runs one step."""
    layer = Joint.Params(
        vocab_size=TOKENS - 1, encoded_dim=8, predicted_dim=8, dim=64, block_frames=block_frames
    ).instantiate()
    ctx, theta = StepContext(), layer.init(seed=1)
    encoded, predicted = tf.ones([BATCH, FRAMES, 8]), tf.ones([BATCH, LABELS + 1, 8])
    labels = tf.zeros([BATCH, LABELS], tf.int32)

    def step(theta: Any) -> Any:
        weights = tf.nest.flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            blank, label = layer.log_probs(theta, encoded, predicted, labels, ctx)
            nats = lattice_loss(
                blank,
                label,
                ctx,
                num_frames=tf.fill([BATCH], FRAMES),
                num_labels=tf.fill([BATCH], LABELS),
            )
        return nats, tape.gradient(nats, weights)

    traced = tf.function(step, autograph=False).get_concrete_function(theta)
    before = peak_mb()
    nats, _ = traced(*tf.nest.flatten(theta))
    if not float(nats[0]) > 0:
        raise SystemExit(f"the loss is {nats}")
    print(peak_mb() - before)


if __name__ == "__main__":
    main(int(sys.argv[1]))
