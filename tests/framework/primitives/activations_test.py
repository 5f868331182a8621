"""Activations: values against NumPy formulas, gradients against float64 autodiff, at extremes."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.costs import graph_memory
from tekso.framework.primitives import activations
from tekso.framework.primitives.activations import NAMES, activate
from tekso.framework.primitives.fusion import XlaFusion, no_fusion

FUSIONS = {"plain": no_fusion, "compiled": XlaFusion()}
X = np.array([-30.0, -3.0, -1.0, -0.5, -1e-3, 1e-3, 0.25, 1.0, 2.5, 8.0, 30.0])

ERF = np.vectorize(math.erf)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FORMULAS = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + ERF(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "swish": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
}


def value_and_gradient(function: Any, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        loss = tf.reduce_sum(y * tf.cast(tf.range(1, x.shape[0] + 1), x.dtype))
    return y, tape.gradient(loss, x)


def test_every_name_has_a_formula_here() -> None:
    assert set(NAMES) == set(FORMULAS) == set(get_args(activations.Activation))


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_formula_and_its_difference_quotient(name: str, fuse: str) -> None:
    y, gradient = value_and_gradient(
        lambda x: activate(name, x, fuse=FUSIONS[fuse]), tf.constant(X)
    )
    formula = FORMULAS[name]
    np.testing.assert_allclose(y, formula(X), rtol=1e-10, atol=1e-12)
    h = 1e-6
    slope = (formula(X + h) - formula(X - h)) / (2 * h)
    np.testing.assert_allclose(gradient, slope * np.arange(1, X.size + 1), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "rtol"), [(tf.float32, 2e-6), (tf.bfloat16, 2e-2)])
def test_keeps_narrow_types(name: str, dtype: tf.DType, rtol: float, fuse: str) -> None:
    x = tf.cast(X, dtype)
    y, gradient = value_and_gradient(lambda x: activate(name, x, fuse=FUSIONS[fuse]), x)
    assert y.dtype == gradient.dtype == dtype
    wide = tf.cast(x, tf.float64)
    expected, expected_gradient = value_and_gradient(lambda x: activate(name, x), wide)
    # Where an activation runs out to 0, the rounding of x times a sum that cancels out is left.
    allowed = rtol * np.maximum(np.abs(X), 1)
    assert (np.abs(tf.cast(y, tf.float64) - expected) <= allowed).all()
    difference = np.abs(tf.cast(gradient, tf.float64) - expected_gradient)
    assert (difference <= 2 * allowed * np.arange(1, X.size + 1)).all()


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_extreme_inputs_give_finite_values_and_gradients(name: str, fuse: str) -> None:
    x = tf.constant([-1e4, -100.0, 0.0, 100.0, 1e4])
    y, gradient = value_and_gradient(lambda x: activate(name, x, fuse=FUSIONS[fuse]), x)
    assert np.isfinite(y).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "swish"])
def test_the_slope_is_0_or_1_where_the_square_of_the_input_overflows(
    name: str, dtype: tf.DType, fuse: str
) -> None:
    x = tf.cast([-3e38, -1e30, -1e20, 1e20, 1e30, 3e38], dtype)
    y, gradient = value_and_gradient(lambda x: activate(name, x, fuse=FUSIONS[fuse]), x)
    assert np.isfinite(tf.cast(y, tf.float32)).all()
    # XLA's erf ends a rounding short of 1.
    np.testing.assert_allclose(tf.cast(gradient, tf.float32), [0, 0, 0, 4, 5, 6], atol=1e-6)


def test_slope_of_relu_at_zero_is_zero() -> None:
    for name in ("relu", "squared_relu"):
        _, gradient = value_and_gradient(lambda x, name=name: activate(name, x), tf.zeros([2]))
        np.testing.assert_array_equal(gradient, [0, 0])


def test_unknown_name_lists_all() -> None:
    with pytest.raises(ValueError, match=r"'silu' is unknown; there are .*swish"):
        activate("silu", tf.ones([2]))


@pytest.mark.parametrize(("name", "each"), [("relu", 1), ("tanh", 1), ("sigmoid", 1), ("gelu", 2)])
def test_what_determines_the_slope_is_saved(name: str, each: int) -> None:
    """The gradient of a product needs each output; that of gelu needs its input too."""
    layers = 6

    def gradients(x: tf.Tensor, w: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = x
            for _ in range(layers):
                y = activate(name, y * w)
        return tape.gradient(y, [x, w])

    spec = tf.TensorSpec([1000])
    traced = tf.function(gradients, autograph=False).get_concrete_function(spec, spec)
    arrays = graph_memory.peak_bytes(traced.graph) / 4000
    assert each * layers <= arrays <= each * layers + 5  # some are computed
