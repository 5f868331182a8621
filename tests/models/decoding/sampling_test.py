"""Sampling against exact distributions on a tiny vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.models.decoding.sampling import check_sampling, sample

LOGITS = np.log(np.array([0.05, 0.4, 0.02, 0.25, 0.13, 0.15], np.float32))
NUM_DRAWS = 20_000
# 99.9 % quantiles of chi-square by degrees of freedom (tables): a sound sampler fails once in 1000
# seeds, and the seed is fixed.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 5: 20.52}


def draws(**how: float | None) -> np.ndarray:
    uniform = StepContext(seed=7).uniform(Layer.Params().instantiate(), [NUM_DRAWS, 6], "sample")
    logits = tf.tile([tf.constant(LOGITS)], [NUM_DRAWS, 1])
    return np.bincount(sample(logits, uniform, **how).numpy(), minlength=6)


def assert_follows(counts: np.ndarray, shares: np.ndarray) -> None:
    """Chi-square test of counts against exact shares; what has no share is never drawn."""
    shares = shares / shares.sum()
    assert counts[shares == 0].sum() == 0
    kept = shares > 0
    expected = shares[kept] * counts.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    if kept.sum() > 1:
        assert statistic < CHI_SQUARE[int(kept.sum()) - 1]


def test_plain_sampling_follows_the_softmax() -> None:
    assert_follows(draws(), np.exp(LOGITS.astype(np.float64)))


def test_temperature_sharpens_and_flattens() -> None:
    p = np.exp(LOGITS.astype(np.float64))
    assert_follows(draws(temperature=0.5), p**2)
    assert_follows(draws(temperature=2.0), p**0.5)


def test_top_k_keeps_the_likeliest() -> None:
    p = np.exp(LOGITS.astype(np.float64))
    p[[0, 2, 4]] = 0
    assert_follows(draws(top_k=3), p)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, [1]), (0.41, [1, 3]), (0.79, [1, 3, 5]), (0.92, [1, 3, 5, 4])]
)
def test_nucleus_keeps_the_smallest_set_of_that_share(top_p: float, kept: list[int]) -> None:
    p = np.zeros(6)
    p[kept] = np.exp(LOGITS.astype(np.float64))[kept]
    assert_follows(draws(top_p=top_p), p)


def test_nucleus_share_is_that_of_what_top_k_left() -> None:
    # Of the three likeliest the shares are 0.5, 0.3125 and 0.1875: two make up 0.8.
    p = np.zeros(6)
    p[[1, 3]] = 0.4, 0.25
    assert_follows(draws(top_k=3, top_p=0.8), p)


def test_nucleus_breaks_ties_by_the_lower_id() -> None:
    logits = tf.zeros([50, 4])
    uniform = tf.random.stateless_uniform([50, 4], [1, 2])
    assert set(sample(logits, uniform, top_p=0.5).numpy()) == {0, 1}


def test_greedy_is_the_argmax_and_so_are_its_limits() -> None:
    logits = tf.random.stateless_normal([40, 7], [3, 4])
    uniform = tf.random.stateless_uniform([40, 7], [5, 6])
    want = np.argmax(logits.numpy(), -1)
    for how in ({"temperature": 0.0}, {"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}):
        np.testing.assert_array_equal(sample(logits, uniform, **how).numpy(), want)


def test_extreme_uniform_numbers_stay_finite() -> None:
    logits = tf.constant([[0.0, 1.0, 50.0]])
    for value in (0.0, 1.0 - 2.0**-24):
        assert sample(logits, tf.fill([1, 3], value)).numpy() == [2]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = tf.constant([[0.0, float("-inf"), 0.0]] * 200)
    uniform = tf.random.stateless_uniform([200, 3], [1, 2])
    for top_p in (1.0, 0.999):
        assert 1 not in sample(logits, uniform, top_p=top_p).numpy()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    settings = {"temperature": 1.0, "top_k": None, "top_p": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"task\.decode\.{name} is {value}"):
        check_sampling(**settings, where="task.decode")
