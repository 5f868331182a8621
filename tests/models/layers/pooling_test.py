"""Pooling against loops over the windows in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.pooling import (
    AveragePool,
    GlobalAveragePool,
    MaxPool,
    mean_over,
    mean_over_tokens,
)

X = np.random.default_rng(0).normal(size=(2, 7, 6, 3))

WINDOWS: dict[str, dict[str, Any]] = {
    "default": {},
    "3x3 stride 1": {"window_shape": (3, 3), "strides": (1, 1)},
    "3x3 stride 2": {"window_shape": (3, 3)},
    "2x3 strides 1, 2 valid": {"window_shape": (2, 3), "strides": (1, 2), "padding": "VALID"},
    "3x3 stride 2 fixed": {"window_shape": (3, 3), "padding": "FIXED"},
    "3x2 strides 2, 3 fixed": {"window_shape": (3, 2), "strides": (2, 3), "padding": "FIXED"},
    "gaps": {"window_shape": (1, 2), "strides": (3, 3)},
}


def pooled(x: np.ndarray, params: Any, reduce: Any) -> np.ndarray:
    ranges: list[list[slice]] = []
    for d in (0, 1):
        size, k, stride = x.shape[1 + d], params.window_shape[d], params.strides[d]
        if params.padding == "SAME":
            count = math.ceil(size / stride)
            before = max((count - 1) * stride + k - size, 0) // 2
        elif params.padding == "FIXED":
            count, before = (size - 1) // stride + 1, (k - 1) // 2
        else:
            count, before = (size - k) // stride + 1, 0
        starts = [i * stride - before for i in range(count)]
        ranges.append([slice(max(s, 0), s + k) for s in starts])
    rows, columns = ranges
    return np.stack([np.stack([reduce(x[:, r, c], (1, 2)) for c in columns], 1) for r in rows], 1)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(("kind", "reduce"), [(MaxPool, np.max), (AveragePool, np.mean)])
def test_pools_what_lies_inside_the_window(kind: Any, reduce: Any, name: str) -> None:
    layer = kind.Params(**WINDOWS[name]).instantiate()
    assert layer.specs() == {}
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer.fprop(Theta(), x, StepContext())
    np.testing.assert_allclose(y, pooled(X, layer.params, reduce), rtol=1e-12)
    assert layer.output_size(7, 6) == tuple(y.shape[1:3])
    # Every output passes its whole gradient on.
    assert tf.reduce_sum(tape.gradient(y, x)).numpy() == pytest.approx(tf.size(y).numpy())


def test_padding_does_not_win_against_negative_numbers() -> None:
    layer = MaxPool.Params(window_shape=(3, 3), strides=(1, 1)).instantiate()
    x = -1 - np.abs(X)
    assert float(tf.reduce_max(layer.fprop(Theta(), tf.constant(x), StepContext()))) <= -1


def test_global_average_is_the_mean_over_the_image() -> None:
    layer = GlobalAveragePool.Params().instantiate()
    y = layer.fprop(layer.init(), tf.constant(X), StepContext())
    np.testing.assert_allclose(y, X.mean((1, 2)), rtol=1e-12)


@pytest.mark.parametrize("kind", [MaxPool, AveragePool])
def test_windows_that_cannot_be_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"strides is \(2, 0\)"):
        kind.Params(strides=(2, 0)).instantiate()
    layer = kind.Params(window_shape=(3, 7), padding="VALID").instantiate()
    with pytest.raises(ValueError, match="does not fit in width 6"):
        layer.fprop(Theta(), tf.constant(X), StepContext())


def test_global_average_of_float16_is_summed_in_float32() -> None:
    """In float16, 2048 + 1 is 2048."""
    layer = GlobalAveragePool.Params().instantiate()
    y = layer.fprop(Theta(), tf.ones([1, 64, 64, 2], tf.float16), StepContext(mode="eval"))
    assert y.dtype == tf.float16
    np.testing.assert_array_equal(y, [[1, 1]])


def test_means_of_many_float16_numbers_do_not_round_their_sum() -> None:
    x = tf.fill([2, 64, 64, 4], tf.constant(1.5, tf.float16))
    image = mean_over(x, [1, 2])
    assert image.dtype == tf.float16
    np.testing.assert_array_equal(image, np.full([2, 4], 1.5))
    is_token = tf.constant(np.arange(4096) < [[4000], [0]], tf.float32)
    text = mean_over_tokens(tf.reshape(x, [2, 4096, 4]), is_token)
    assert text.dtype == tf.float16
    np.testing.assert_array_equal(text, [[1.5] * 4, [0.0] * 4])
