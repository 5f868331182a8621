"""The CTC loss against a sum over all paths, TensorFlow's loss and closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.ctc_loss import ctc_frames_needed, ctc_loss

BLANK = 2
CASES: list[tuple[int, list[int]]] = [
    (4, [0, 1]),
    (4, [0, 0]),
    (3, [1, 1]),
    (2, [0, 0]),  # impossible: a blank must be between equal labels
    (5, [1, 0, 1]),
    (4, []),
    (0, []),
    (0, [1]),  # impossible
    (1, [1]),
    (1, [0, 1]),  # impossible
]
FRAMES, MOST = 5, 3
RNG = np.random.default_rng(1)
LOGITS = RNG.normal(0, 2, (len(CASES), FRAMES, 3))


def arrays() -> dict[str, Any]:
    labels = np.array([own + [0] * (MOST - len(own)) for _, own in CASES], np.int32)
    return {
        "labels": tf.constant(labels),
        "num_frames": tf.constant([n for n, _ in CASES]),
        "num_labels": tf.constant([len(own) for _, own in CASES]),
    }


def merged(path: tuple[int, ...]) -> list[int]:
    return [token for token, _ in itertools.groupby(path) if token != BLANK]


def sum_over_paths(logits: np.ndarray, labels: list[int]) -> float:
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    total = sum(
        math.prod(probs[t, token] for t, token in enumerate(path))
        for path in itertools.product(range(3), repeat=len(logits))
        if merged(path) == labels
    )
    return -math.log(total) if total else math.inf


def losses(logits: Any, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses, and the gradient of their sum with weights 1, 2, 3, …."""
    given = {**arrays(), **changes}
    x = tf.convert_to_tensor(logits)
    with tf.GradientTape() as tape:
        tape.watch(x)
        nats = ctc_loss(x, given.pop("labels"), StepContext(), blank_id=BLANK, **given)
        weights = tf.cast(tf.range(1, len(nats) + 1), nats.dtype)
        total = tf.reduce_sum(tf.where(tf.math.is_finite(nats), nats * weights, 0.0))
    return nats.numpy(), tape.gradient(total, x).numpy()


def test_it_is_the_sum_over_all_paths_and_so_is_its_gradient() -> None:
    nats, gradient = losses(LOGITS)
    expected = [sum_over_paths(LOGITS[i, :n], own) for i, (n, own) in enumerate(CASES)]
    np.testing.assert_allclose(nats, expected, rtol=1e-10)
    assert [i for i, value in enumerate(nats) if math.isinf(value)] == [3, 7, 9]
    for i, (n, own) in enumerate(CASES):
        for t, v in itertools.product(range(FRAMES), range(3)):
            change = np.zeros((FRAMES, 3))
            change[t, v] = 1e-5
            slope = 0.0
            if t < n and math.isfinite(expected[i]):
                up, down = (
                    sum_over_paths((LOGITS[i] + sign * change)[:n], own) for sign in (1, -1)
                )
                slope = (i + 1) * (up - down) / 2e-5
            assert gradient[i, t, v] == pytest.approx(slope, abs=1e-6)


def larger() -> tuple[np.ndarray, dict[str, Any]]:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 10, (4, 12)).astype(np.int32)
    labels[labels >= BLANK] += 1
    given = {
        "labels": tf.constant(labels),
        "num_frames": tf.constant([60, 45, 33, 50]),
        "num_labels": tf.constant([12, 7, 1, 0]),
    }
    return rng.normal(0, 3, (4, 60, 11)).astype(np.float32), given


@pytest.mark.parametrize("graph", [False, True])
def test_loss_and_gradient_are_those_of_tensorflow(graph: bool) -> None:
    logits, given = larger()

    def ours(x: tf.Tensor) -> tf.Tensor:
        own = dict(given)
        return ctc_loss(x, own.pop("labels"), StepContext(), blank_id=BLANK, **own)

    def theirs(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.ctc_loss(
            given["labels"],
            x,
            label_length=given["num_labels"],
            logit_length=given["num_frames"],
            logits_time_major=False,
            blank_index=BLANK,
        )

    def both(x: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        found = []
        for function in (ours, theirs):
            with tf.GradientTape() as tape:
                tape.watch(x)
                nats = function(x)
            found.append((nats, tape.gradient(nats, x)))
        return found

    run = tf.function(both, autograph=False) if graph else both
    (nats, gradient), (other_nats, other_gradient) = run(tf.constant(logits))
    np.testing.assert_allclose(nats, other_nats, rtol=1e-5)
    np.testing.assert_allclose(gradient, other_gradient, atol=1e-4)


def test_uniform_logits_give_the_number_of_paths() -> None:
    frames, own, tokens = 40, 6, 5
    nats = ctc_loss(
        tf.zeros([1, frames, tokens]),
        tf.constant([[0, 1, 2, 3, 0, 1]]),
        StepContext(),
        num_frames=tf.constant([frames]),
        num_labels=tf.constant([own]),
        blank_id=4,
    )
    paths = math.comb(frames + own, 2 * own)
    assert float(nats[0]) == pytest.approx(frames * math.log(tokens) - math.log(paths), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_are_summed_in_float32(dtype: str) -> None:
    logits, given = larger()
    rounded = tf.cast(logits, dtype)
    nats, gradient = losses(rounded, **given)
    wide_nats, wide_gradient = losses(tf.cast(rounded, tf.float32), **given)
    assert nats.dtype == np.float32
    np.testing.assert_allclose(nats, wide_nats, rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(np.float32), wide_gradient, rtol=1e-2, atol=1e-6)


def test_padding_and_extreme_logits_have_no_effect_and_no_nan() -> None:
    logits, given = larger()
    with_garbage = logits.copy()
    for i, n in enumerate(given["num_frames"].numpy()):
        with_garbage[i, n:] = 1e4
    for one, other in zip(losses(logits, **given), losses(with_garbage, **given), strict=True):
        np.testing.assert_array_equal(one, other)
    forbidden = logits.copy()
    forbidden[:, :, 7] = -np.inf
    nats, gradient = losses(forbidden, **given)
    assert not np.isnan(nats).any() and np.isfinite(gradient).all()


def test_a_batch_without_labels_needs_no_label_column() -> None:
    nats, gradient = losses(
        LOGITS[:2], labels=tf.zeros([2, 0], tf.int32), num_labels=[0, 0], num_frames=[4, 0]
    )
    blanks = LOGITS[0, :4, BLANK] - np.log(np.exp(LOGITS[0, :4]).sum(-1))
    np.testing.assert_allclose(nats, [-blanks.sum(), 0])
    assert np.isfinite(gradient).all()


def test_counts_the_frames_that_a_labelling_needs() -> None:
    given = arrays()
    found = ctc_frames_needed(given["labels"], given["num_labels"]).numpy()
    assert found.tolist() == [2, 3, 3, 3, 3, 0, 0, 1, 1, 2]


def test_thousands_of_nats_lose_no_digits_of_the_gradient_in_float32() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 20, (1, 150, 20)).astype(np.float32)
    labels = np.delete(np.arange(20), BLANK)[rng.integers(0, 19, (1, 25))].astype(np.int32)
    given = {"labels": tf.constant(labels), "num_frames": [150], "num_labels": [25]}
    nats, gradient = losses(logits, **given)
    exact_nats, exact_gradient = losses(logits.astype(np.float64), **given)
    assert exact_nats[0] > 2000
    np.testing.assert_allclose(nats, exact_nats, rtol=1e-6)
    np.testing.assert_allclose(gradient, exact_gradient, atol=1e-4)
