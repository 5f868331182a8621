"""Softmax over a vocabulary: full, and sampled with its expectation and its distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.softmax import SampledSoftmax, Softmax, log_uniform_log_probability

VOCAB, DIM = 11, 4
LABELS = np.array([[0, 10, 3], [5, 5, 1]])


def weights(use_bias: bool) -> tuple[Theta, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(VOCAB, DIM)), rng.normal(size=VOCAB)
    theta = Theta(w=tf.constant(w), b=tf.constant(b)) if use_bias else Theta(w=tf.constant(w))
    return theta, w, b if use_bias else np.zeros(VOCAB)


X = np.random.default_rng(1).normal(size=(2, 3, DIM))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_logits_and_cross_entropy(use_bias: bool, smoothing: float) -> None:
    params = Softmax.Params(input_dim=DIM, vocab_size=VOCAB, use_bias=use_bias)
    layer = params.instantiate()
    theta, w, b = weights(use_bias)
    ctx = StepContext(mode="train")
    logits = X @ w.T + b
    np.testing.assert_allclose(layer.logits(theta, tf.constant(X), ctx), logits, rtol=1e-12)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(VOCAB)[LABELS] + smoothing / VOCAB
    found = layer.cross_entropy(
        theta, tf.constant(X), tf.constant(LABELS), ctx, label_smoothing=smoothing
    )
    np.testing.assert_allclose(found, -(target * log_p).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("kind", [Softmax.Params, SampledSoftmax.Params])
def test_weights_dims_and_first_values(kind: Any) -> None:
    params = kind(input_dim=64, vocab_size=300, use_bias=True)
    if isinstance(params, SampledSoftmax.Params):
        params.num_samples = 5
    layer = params.instantiate()
    assert {path: (s.shape, s.dims) for path, s in layer.specs().items()} == {
        "w": ((300, 64), ("vocab", "embed")),
        "b": ((300,), ("vocab",)),
    }
    theta = layer.init()
    assert np.std(theta.w) == pytest.approx(1 / 8, rel=0.03)  # 1 / sqrt(input_dim)
    np.testing.assert_array_equal(theta.b, np.zeros(300))


# The sampled softmax.


def sampled(num_samples: int, *, use_bias: bool = True, **kwargs: Any) -> SampledSoftmax:
    given = {"input_dim": DIM, "vocab_size": VOCAB, "use_bias": use_bias} | kwargs
    return SampledSoftmax.Params(num_samples=num_samples, **given).instantiate()


def train(step: int = 0, **kwargs: Any) -> StepContext:
    return StepContext(mode="train", seed=1, step=step, **kwargs)


def log_uniform(vocab_size: int) -> np.ndarray:
    k = np.arange(vocab_size)
    return np.log((k + 2) / (k + 1)) / math.log(vocab_size + 1)


@pytest.mark.parametrize("vocab_size", [1, 2, 11, 793_472])
def test_log_uniform_probabilities_follow_the_formula_and_sum_to_one(vocab_size: int) -> None:
    found = np.exp(log_uniform_log_probability(tf.range(vocab_size), vocab_size))
    np.testing.assert_allclose(found, log_uniform(vocab_size), rtol=1e-9)
    assert found.sum() == pytest.approx(1, abs=1e-9)


def test_samples_are_log_uniform() -> None:
    n = 200_000
    drawn = sampled(n).sample(train()).numpy()
    assert drawn.dtype == np.int32
    expected = n * log_uniform(VOCAB)
    chi_square = ((np.bincount(drawn, minlength=VOCAB) - expected) ** 2 / expected).sum()
    freedom = VOCAB - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_samples_of_a_large_vocabulary_reach_its_end_evenly() -> None:
    """With 24 bits some of the last classes would never be drawn, and others twice too often."""
    vocab = 793_472
    layer = sampled(2_000_000, vocab_size=vocab)
    last = layer.sample(train()).numpy()
    last = last[last >= vocab // 2] - vocab // 2
    odd = (last % 2).mean()
    assert abs(odd - 0.5) < 5 * 0.5 / math.sqrt(last.size)
    p = log_uniform(vocab)[vocab // 2 :]
    expected_mean = (np.arange(p.size) * p).sum() / p.sum()
    assert last.mean() == pytest.approx(expected_mean, abs=5 * p.size / 12**0.5 / last.size**0.5)


def test_samples_depend_on_seed_and_step_not_on_the_part_of_the_batch() -> None:
    layer = sampled(50)
    first = layer.sample(train(step=3))
    np.testing.assert_array_equal(first, layer.sample(train(step=3, example_offset=7)))
    np.testing.assert_array_equal(
        first, tf.function(lambda: layer.sample(train(step=3)), jit_compile=True)()
    )
    assert (first.numpy() != layer.sample(train(step=4)).numpy()).any()


def naive(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, labels: np.ndarray, samples: np.ndarray
) -> np.ndarray:
    """The estimate, position by position."""
    out = np.zeros(labels.shape)
    correction = np.log(len(samples) * log_uniform(len(w)))
    for at in np.ndindex(*labels.shape):
        logits = w @ x[at] + b
        others = [np.exp(logits[s] - correction[s]) for s in samples if s != labels[at]]
        true = logits[labels[at]]
        out[at] = np.log(np.exp(true) + sum(others)) - true
    return out


@pytest.mark.parametrize("use_bias", [True, False])
def test_sampled_loss_and_gradients_equal_the_estimate_in_numpy(use_bias: bool) -> None:
    layer = sampled(6, use_bias=use_bias)
    theta, w, b = weights(use_bias)
    ctx = train(step=2)
    samples = layer.sample(ctx).numpy()
    assert np.isin(LABELS, samples).any()  # also a label that was drawn
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch((x, theta))
        loss = layer.cross_entropy(theta, x, tf.constant(LABELS), ctx)
        total = tf.reduce_sum(loss)
    np.testing.assert_allclose(loss, naive(X, w, b, LABELS, samples), rtol=1e-9)
    found = [tf.convert_to_tensor(g) for g in tape.gradient(total, [x, *theta.values()])]
    h = 1e-6
    for gradient, index in zip(found, (0, 1, 2), strict=False):
        args = [X, w, b]
        for at in list(np.ndindex(*args[index].shape))[::3]:
            step = np.zeros_like(args[index])
            step[at] = h
            up, down = (
                naive(*[a + s * step if i == index else a for i, a in enumerate(args)],
                      LABELS, samples).sum()
                for s in (1, -1)
            )  # fmt: skip
            assert gradient.numpy()[at] == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-7)


def test_the_estimated_normaliser_is_right_in_expectation() -> None:
    """exp(loss) * exp(true logit) is the estimate of the normaliser; its mean over steps is it."""
    layer = sampled(20)
    theta, w, b = weights(True)
    run = tf.function(
        lambda step: tf.exp(
            layer.cross_entropy(theta, tf.constant(X), tf.constant(LABELS), train(step))
        )
    )
    draws = np.stack([run(tf.constant(i, tf.int64)).numpy() for i in range(400)])
    logits = X @ w.T + b
    true = np.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    expected = np.exp(logits).sum(-1) / np.exp(true)
    error = draws.std(0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - expected) < 5 * error).all()


def test_the_sampled_loss_approaches_the_full_one() -> None:
    layer = sampled(100_000)
    theta, *_ = weights(True)
    arguments = (theta, tf.constant(X), tf.constant(LABELS))
    full = layer.cross_entropy(*arguments, StepContext(mode="eval"))
    np.testing.assert_allclose(layer.cross_entropy(*arguments, train()), full, rtol=0.02)


@pytest.mark.parametrize("mode", ["eval", "decode"])
def test_outside_training_the_softmax_is_full(mode: Any) -> None:
    theta, *_ = weights(True)
    full = Softmax.Params(input_dim=DIM, vocab_size=VOCAB, use_bias=True).instantiate()
    arguments = (theta, tf.constant(X), tf.constant(LABELS), StepContext(mode=mode))
    np.testing.assert_array_equal(
        sampled(3).cross_entropy(*arguments, label_smoothing=0.1),
        full.cross_entropy(*arguments, label_smoothing=0.1),
    )


def test_parts_of_a_batch_have_the_loss_of_the_whole() -> None:
    layer = sampled(5)
    theta, *_ = weights(True)
    whole = layer.cross_entropy(theta, tf.constant(X), tf.constant(LABELS), train())
    part = layer.cross_entropy(
        theta, tf.constant(X[1:]), tf.constant(LABELS[1:]), train(example_offset=1)
    )
    np.testing.assert_allclose(part, whole[1:], rtol=1e-12)


def test_extremes_stay_finite() -> None:
    theta = Theta(w=tf.constant(np.full((VOCAB, DIM), 1e3)), b=tf.zeros([VOCAB], tf.float64))
    only_the_label = sampled(1, vocab_size=1, use_bias=False)
    for layer, weights_, labels in (
        (sampled(3), theta, LABELS),
        (only_the_label, Theta(w=tf.ones([1, DIM], tf.float64)), 0 * LABELS),
    ):
        x = tf.constant(1e3 * X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = layer.cross_entropy(weights_, x, tf.constant(labels), train())
        assert np.isfinite(loss).all()
        assert np.isfinite(tape.gradient(loss, x)).all()
    np.testing.assert_array_equal(loss, np.zeros(LABELS.shape))  # one class alone


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples is 0, must be at least 1"):
        sampled(0)
    theta, *_ = weights(True)
    with pytest.raises(ValueError, match=r"label_smoothing is 0.1.*use Softmax"):
        sampled(3).cross_entropy(
            theta, tf.constant(X), tf.constant(LABELS), train(), label_smoothing=0.1
        )
