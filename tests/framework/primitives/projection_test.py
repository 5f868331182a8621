"""Projection: values and gradients against einsum in float64, in every form of its operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion
from tekso.framework.primitives.projection import project

FUSIONS = {"plain": no_fusion, "compiled": XlaFusion()}

# Shapes of x and w, number of contracted dims, einsum.
CASES = {
    "matrix": ((2, 3, 4), (4, 5), 1, "bti,io->bto"),
    "one example": ((1, 4), (4, 5), 1, "bi,io->bo"),
    "no leading dims": ((4,), (4, 5), 1, "i,io->o"),
    "to one": ((3, 4), (4, 1), 1, "bi,io->bo"),
    "from one": ((3, 1), (1, 5), 1, "bi,io->bo"),
    "narrowing": ((3, 7), (7, 2), 1, "bi,io->bo"),
    "to heads": ((2, 3, 4), (4, 2, 5), 1, "bti,inh->btnh"),
    "from heads": ((2, 3, 4, 5), (4, 5, 6), 2, "btnh,nho->bto"),
    "heads to heads": ((2, 4, 5), (4, 5, 3, 2), 2, "bnh,nhkv->bkv"),
}


def value_and_gradients(
    function: Any, args: list[np.ndarray], dtype: tf.DType
) -> tuple[np.ndarray, list[np.ndarray]]:
    tensors = [tf.cast(a, dtype) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        y = function(*tensors)
        # A loss that is not linear, so that a gradient passed on unchanged is seen.
        loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float64)) + tf.cast(y, tf.float64) ** 2)
    gradients = tape.gradient(loss, tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)
    assert y.dtype == dtype
    return tf.cast(y, tf.float64).numpy(), [tf.cast(g, tf.float64).numpy() for g in gradients]


def assert_equal_einsum(
    case: str, fuse: Fuse, dtype: tf.DType, rtol: float, *, bias: bool, wrap: Any = lambda f: f
) -> None:
    x_shape, w_shape, num_contracted, equation = CASES[case]
    rng = np.random.default_rng(0)
    args = [rng.normal(size=x_shape), rng.normal(size=w_shape)]
    if bias:
        args.append(rng.normal(size=w_shape[num_contracted:]))

    def naive(x: tf.Tensor, w: tf.Tensor, *b: tf.Tensor) -> tf.Tensor:
        y = tf.einsum(equation, x, w)
        return y + b[0] if b else y

    def fast(*args: tf.Tensor) -> tf.Tensor:
        return project(*args, num_contracted=num_contracted, fuse=fuse)

    y, gradients = value_and_gradients(wrap(fast), args, dtype)
    expected, expected_gradients = value_and_gradients(naive, args, tf.float64)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(y, expected, rtol=rtol, atol=rtol * scale)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_einsum_in_float64(case: str, bias: bool, fuse: str) -> None:
    assert_equal_einsum(case, FUSIONS[fuse], tf.float64, 1e-12, bias=bias)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    # Rounding of the type, 6e-8 and 4e-3, times a handful of operations.
    [(tf.float32, 1e-6), (tf.bfloat16, 3e-2)],
)
def test_equals_einsum_in_narrow_types(dtype: tf.DType, rtol: float) -> None:
    for fuse in FUSIONS.values():
        assert_equal_einsum("to heads", fuse, dtype, rtol, bias=True)


def test_a_graph_with_an_unknown_batch_gives_the_same() -> None:
    def in_graph(function: Any) -> Any:
        signature = [tf.TensorSpec([None, 3, 4], tf.float64), tf.TensorSpec([4, 2, 5], tf.float64)]
        return tf.function(function, input_signature=signature, autograph=False)

    assert_equal_einsum("to heads", no_fusion, tf.float64, 1e-12, bias=False, wrap=in_graph)


def test_dims_that_do_not_meet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"last 1 dims of x \(2, 3\).*w \(4, 5\)"):
        project(tf.ones([2, 3]), tf.ones([4, 5]))
    with pytest.raises(ValueError, match="last 2 dims"):
        project(tf.ones([2, 3, 4]), tf.ones([4, 3, 5]), num_contracted=2)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_the_gradient_of_a_bias_is_summed_in_float32(dtype: tf.DType) -> None:
    """In float16, 2048 + 1 is 2048."""
    b = tf.zeros([3], dtype)
    with tf.GradientTape() as tape:
        tape.watch(b)
        y = project(tf.ones([4096, 2], dtype), tf.ones([2, 3], dtype), b)
    np.testing.assert_array_equal(tf.cast(tape.gradient(y, b), tf.float32), np.full(3, 4096))
