"""LayerNorm and RMSNorm: values and gradients against float64 autodiff of the plain formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.primitives.normalization import layer_norm, rms_norm

FUSIONS = {"plain": no_fusion, "compiled": XlaFusion()}
KINDS = ("layer", "layer without bias", "rms")


def naive(kind: str, x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor, epsilon: float) -> tf.Tensor:
    if kind == "rms":
        return x / tf.sqrt(tf.reduce_mean(x * x, -1, keepdims=True) + epsilon) * scale
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean((x - mean) ** 2, -1, keepdims=True)
    y = (x - mean) / tf.sqrt(variance + epsilon) * scale
    return y if kind == "layer without bias" else y + bias


def fast(
    kind: str, x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor, epsilon: float, fuse: Any
) -> tf.Tensor:
    if kind == "rms":
        return rms_norm(x, scale, epsilon=epsilon, fuse=fuse)
    given = None if kind == "layer without bias" else bias
    return layer_norm(x, scale, given, epsilon=epsilon, fuse=fuse)


def value_and_gradients(function: Any, args: list[np.ndarray], dtype: tf.DType) -> list[np.ndarray]:
    tensors = [tf.cast(a, dtype) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        y = function(*tensors)
        weights = tf.cos(tf.reshape(tf.range(y.shape.num_elements(), dtype=tf.float64), y.shape))
        loss = tf.reduce_sum(weights * tf.cast(y, tf.float64))
    assert y.dtype == dtype
    gradients = tape.gradient(loss, tensors)
    assert all(g is None or g.dtype == dtype for g in gradients)
    return [tf.cast(t, tf.float64).numpy() for t in (y, *gradients) if t is not None]


def assert_equal_naive(
    kind: str, x: np.ndarray, fuse: Any, dtype: tf.DType, rtol: float, epsilon: float = 1e-3
) -> None:
    rng = np.random.default_rng(1)
    args = [x, rng.normal(size=x.shape[-1]), rng.normal(size=x.shape[-1])]
    args = [tf.cast(tf.cast(a, dtype), tf.float64).numpy() for a in args]  # what the type can hold
    found = value_and_gradients(lambda *a: fast(kind, *a, epsilon, fuse), args, dtype)
    expected = value_and_gradients(lambda *a: naive(kind, *a, epsilon), args, tf.float64)
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=rtol, atol=rtol * max(np.abs(e).max(), 1e-300))


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5), (2, 3, 2, 7), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula_in_float64(kind: str, shape: tuple[int, ...], fuse: str) -> None:
    x = np.random.default_rng(0).normal(size=shape) + 0.5
    assert_equal_naive(kind, x, FUSIONS[fuse], tf.float64, 1e-10)


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize(("dtype", "rtol"), [(tf.float32, 3e-6), (tf.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula_in_narrow_types(
    kind: str, dtype: tf.DType, rtol: float, fuse: str
) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 40))
    assert_equal_naive(kind, x, FUSIONS[fuse], dtype, rtol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "rtol"),
    [
        # A mean 1000 times the deviation loses 3 of 7 digits of x itself, no more.
        (1000 + np.random.default_rng(0).normal(size=(3, 8)), 1e-3),
        (1e-6 * np.random.default_rng(0).normal(size=(3, 8)), 1e-5),
        (1e15 * np.random.default_rng(0).normal(size=(3, 8)), 1e-5),
    ],
    ids=["far mean", "tiny", "huge"],
)
def test_extremes_in_float32(kind: str, x: np.ndarray, rtol: float) -> None:
    assert_equal_naive(kind, x, no_fusion, tf.float32, rtol, epsilon=1e-6)


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_constants_give_finite_values_and_gradients(kind: str, fuse: str) -> None:
    for x in (np.zeros((2, 4)), np.full((2, 4), 3.0)):
        args = [x, np.ones(4), np.ones(4)]
        found = value_and_gradients(
            lambda *a: fast(kind, *a, 1e-6, FUSIONS[fuse]), args, tf.float32
        )
        assert all(np.isfinite(f).all() for f in found)


def test_statistics_of_bfloat16_inputs_are_computed_in_float32() -> None:
    """The mean of 4096 equal numbers would not come out in bfloat16 sums."""
    x = tf.cast(tf.fill([1, 4096], 1.5), tf.bfloat16)
    y = rms_norm(x, tf.ones([4096], tf.bfloat16), epsilon=0.0)
    np.testing.assert_array_equal(tf.cast(y, tf.float32), np.ones((1, 4096)))
