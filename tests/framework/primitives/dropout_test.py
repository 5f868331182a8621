"""Dropout: the mask in the gradient is that of the forward pass, and depends on position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.primitives.dropout import dropout
from tekso.framework.primitives.fusion import XlaFusion, no_fusion

FUSIONS = {"plain": no_fusion, "compiled": XlaFusion()}
KEY = tf.constant(0x1234567, tf.uint32)


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
def test_value_and_gradient_are_products_with_one_mask(
    shape: tuple[int, ...], dtype: tf.DType, fuse: str
) -> None:
    rng = np.random.default_rng(0)
    x, dy = (tf.cast(rng.normal(size=shape), dtype) for _ in range(2))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = dropout(x, KEY, 3, rate=0.25, fuse=FUSIONS[fuse])
    gradient = tape.gradient(y, x, output_gradients=dy)
    u = counter_hash.uniform(KEY, shape, 3).numpy()
    mask = tf.cast(np.where(u >= 0.25, np.float32(1 / 0.75), 0), dtype)
    assert y.dtype == gradient.dtype == dtype
    np.testing.assert_array_equal(y, x * mask)
    np.testing.assert_array_equal(gradient, dy * mask)


def test_the_offset_may_be_any_integer_or_tensor() -> None:
    x = tf.ones([5, 7])
    expected = dropout(x, KEY, 0, rate=0.5)[2:]
    for offset in (2, np.int64(2), tf.constant(2), tf.constant(2, tf.uint32)):
        np.testing.assert_array_equal(dropout(x[2:], KEY, offset, rate=0.5), expected)


def test_a_graph_draws_anew_for_a_new_key_without_tracing_anew() -> None:
    traces: list[int] = []

    @tf.function(autograph=False)
    def run(key: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        return dropout(tf.ones([20, 30]), key, 0, rate=0.5)

    first: Any = run(KEY)
    second: Any = run(KEY + tf.constant(1, tf.uint32))
    assert np.abs(first - second).max() > 0
    assert len(traces) == 1


@pytest.mark.parametrize("rate", [1e-4, 0.1, 0.9, 0.999])
def test_the_mean_is_kept_at_any_rate(rate: float) -> None:
    y = dropout(tf.ones([1000, 1000]), KEY, 0, rate=rate).numpy()
    error = np.sqrt(rate / (1 - rate) / y.size)
    assert abs(y.mean(dtype=np.float64) - 1) < 5 * error + 1e-6
