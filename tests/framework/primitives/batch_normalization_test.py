"""Batch normalisation against its formula and TensorFlow's own gradient of it, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives.batch_normalization import batch_norm
from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion


def formula(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor, flags: tf.Tensor) -> Any:
    count = tf.reduce_sum(flags)
    mean = tf.reduce_sum(x * flags, [0, 1]) / count
    variance = tf.reduce_sum((x - mean) ** 2 * flags, [0, 1]) / count
    return (x - mean) / tf.sqrt(variance + 0.1) * scale + bias, mean, variance * count


@pytest.mark.parametrize("fuse", [no_fusion, XlaFusion()], ids=["plain", "compiled"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_values_and_gradients_are_those_of_the_formula(fuse: Fuse, is_masked: bool) -> None:
    random = np.random.default_rng(0)
    args = [tf.constant(random.normal(size=shape)) for shape in ((5, 4, 3), (3,), (3,))]
    mask = random.integers(0, 2, (5, 4, 1)) > 0
    flags = mask.astype(np.float64) if is_masked else np.ones((5, 4, 1))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(args)
        expected = formula(*args, flags)
        # In two replicas, each of which has all examples.
        found = batch_norm(
            *args,
            tf.constant(mask) if is_masked else None,
            epsilon=0.1,
            sum_over_replicas=lambda x: 2 * x,
            fuse=fuse,
        )
        losses = [tf.reduce_sum(tf.sin(y)) for y in (expected[0], found.y)]
    for mine, wanted in zip((found.y, found.mean, found.squares), expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-12)
    np.testing.assert_allclose(found.count, flags.sum())
    np.testing.assert_allclose(found.total, (args[0] * flags).numpy().sum((0, 1)), rtol=1e-12)
    gradients = [tape.gradient(loss, args) for loss in losses]
    for wanted, mine in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fuse", [no_fusion, XlaFusion()], ids=["plain", "compiled"])
def test_many_values_far_from_zero_are_normalised_to_mean_zero(fuse: Fuse) -> None:
    """One float32 sum of so many values of 1000 is off by some thousandths of their deviation."""
    x = (1000 + np.random.default_rng(0).normal(size=(32, 64, 64, 3))).astype(np.float32)
    args = tf.constant(x), tf.ones(3), tf.zeros(3), None
    found = batch_norm(*args, epsilon=1e-3, sum_over_replicas=lambda value: value, fuse=fuse)
    wide = x.astype(np.float64)
    rounding = 1000 * 2**-23
    np.testing.assert_allclose(found.mean, wide.mean((0, 1, 2)), rtol=0, atol=rounding)
    mean = found.y.numpy().mean((0, 1, 2), dtype=float)
    np.testing.assert_allclose(mean, 0, atol=2 * rounding)
    np.testing.assert_allclose(found.squares / 2**17, wide.var((0, 1, 2)), rtol=2e-6)


def test_the_count_of_an_input_of_2_31_elements_is_right() -> None:
    """Only the count is computed: it is known from the shape."""

    def count(x: tf.Tensor) -> tf.Tensor:
        args = x, tf.ones(64), tf.zeros(64), None
        return batch_norm(*args, epsilon=1e-3, sum_over_replicas=lambda value: value).count

    spec = tf.TensorSpec([2, 256, 256, 256, 64], tf.bfloat16)
    whole = tf.compat.v1.wrap_function(count, [spec])
    assert float(whole.prune([], whole.outputs)()[0]) == 2 * 256**3
