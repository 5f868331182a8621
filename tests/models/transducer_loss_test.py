"""The transducer loss against a sum over all alignments and closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.transducer_loss import transducer_loss

BLANK, TOKENS = 1, 4
CASES: list[tuple[int, list[int]]] = [
    (3, [0, 2]),
    (2, [2, 2, 3]),
    (1, [3, 0]),  # all labels in one frame
    (4, []),
    (0, [2]),  # impossible: the last blank needs a frame
    (4, [0, 2, 3]),
]
FRAMES, MOST = 4, 3
LOGITS = np.random.default_rng(1).normal(0, 2, (len(CASES), FRAMES, MOST + 1, TOKENS))


def arrays() -> dict[str, Any]:
    labels = np.array([own + [3] * (MOST - len(own)) for _, own in CASES], np.int32)
    return {
        "labels": tf.constant(labels),
        "num_frames": tf.constant([n for n, _ in CASES]),
        "num_labels": tf.constant([len(own) for _, own in CASES]),
    }


def sum_over_alignments(logits: np.ndarray, labels: list[int]) -> float:
    """Sums over the frames in which the labels are emitted; logits are [frames, U + 1, V]."""
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    frames, total = len(logits), 0.0
    for places in itertools.combinations_with_replacement(range(frames), len(labels)):
        path, u = 1.0, 0
        for t in range(frames):
            for _ in range(places.count(t)):
                path *= probs[t, u, labels[u]]
                u += 1
            path *= probs[t, u, BLANK]
        total += path
    return -math.log(total) if total and frames else math.inf


def losses(logits: Any, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses, and the gradient of their sum with weights 1, 2, 3, …."""
    given = {**arrays(), **changes}
    x = tf.convert_to_tensor(logits)
    with tf.GradientTape() as tape:
        tape.watch(x)
        nats = transducer_loss(x, given.pop("labels"), StepContext(), blank_id=BLANK, **given)
        weights = tf.cast(tf.range(1, len(nats) + 1), nats.dtype)
        total = tf.reduce_sum(tf.where(tf.math.is_finite(nats), nats * weights, 0.0))
    return nats.numpy(), tape.gradient(total, x).numpy()


def test_it_is_the_sum_over_all_alignments_and_so_is_its_gradient() -> None:
    nats, gradient = losses(LOGITS)
    expected = [
        sum_over_alignments(LOGITS[i, :n, : len(own) + 1], own) for i, (n, own) in enumerate(CASES)
    ]
    np.testing.assert_allclose(nats, expected, rtol=1e-10)
    assert [i for i, value in enumerate(nats) if math.isinf(value)] == [4]
    for i, (n, own) in enumerate(CASES):
        for place in itertools.product(range(FRAMES), range(MOST + 1), range(TOKENS)):
            change = np.zeros(LOGITS.shape[1:])
            change[place] = 1e-5
            slope = 0.0
            if place[0] < n and place[1] <= len(own):
                up, down = (
                    sum_over_alignments((LOGITS[i] + sign * change)[:n], own) for sign in (1, -1)
                )
                slope = (i + 1) * (up - down) / 2e-5
            assert gradient[(i, *place)] == pytest.approx(slope, abs=1e-6)


def test_uniform_logits_give_the_number_of_alignments_also_in_a_graph() -> None:
    frames, own, tokens = 30, 12, 5
    given = {"num_frames": tf.constant([frames]), "num_labels": tf.constant([own])}

    def both(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            labels = tf.zeros([1, own + 3], tf.int32)
            nats = transducer_loss(x, labels, StepContext(), blank_id=BLANK, **given)
        return nats, tape.gradient(nats, x)

    x = tf.zeros([1, frames + 2, own + 4, tokens])
    nats, gradient = tf.function(both, autograph=False)(x)
    paths = math.comb(frames + own - 1, own)
    expected = (frames + own) * math.log(tokens) - math.log(paths)
    assert float(nats[0]) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, both(x)[1], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_are_summed_in_float32(dtype: str) -> None:
    rounded = tf.cast(LOGITS, dtype)
    nats, gradient = losses(rounded)
    wide_nats, wide_gradient = losses(tf.cast(rounded, tf.float32))
    assert nats.dtype == np.float32
    np.testing.assert_allclose(nats, wide_nats, rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(np.float32), wide_gradient, rtol=1e-2, atol=1e-5)


def test_padding_and_extreme_logits_have_no_effect_and_no_nan() -> None:
    garbage = LOGITS.astype(np.float32)
    for i, (n, own) in enumerate(CASES):
        garbage[i, n:] = 1e4
        garbage[i, :, len(own) + 1 :] = 1e4
    for one, other in zip(losses(LOGITS.astype(np.float32)), losses(garbage), strict=True):
        np.testing.assert_array_equal(one, other)
    forbidden = LOGITS.astype(np.float32)
    forbidden[:, :, :, 0] = -np.inf
    nats, gradient = losses(forbidden)
    assert not np.isnan(nats).any() and np.isfinite(gradient).all()


def test_a_batch_without_labels_needs_no_label_column() -> None:
    one_row = LOGITS[:2, :, :1]
    nats, _ = losses(
        one_row, labels=tf.zeros([2, 0], tf.int32), num_labels=[0, 0], num_frames=[4, 1]
    )
    log_probs = one_row - np.log(np.exp(one_row).sum(-1, keepdims=True))
    blank = log_probs[:, :, 0, BLANK]
    np.testing.assert_allclose(nats, [-blank[0].sum(), -blank[1, 0]])
