"""Linear: value, gradients, weights and dims."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Constant
from tekso.models.layers.linear import Linear


@pytest.mark.parametrize("use_bias", [True, False])
def test_is_a_product_and_a_bias(use_bias: bool) -> None:
    layer = Linear.Params(input_dim=3, output_dim=5, use_bias=use_bias).instantiate()
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 4, 3)), rng.normal(size=(3, 5))
    b = rng.normal(size=5) if use_bias else 0.0
    theta = layer.theta({"w": tf.constant(w)} | ({"b": tf.constant(b)} if use_bias else {}))
    with tf.GradientTape() as tape:
        tape.watch(theta)
        y = layer.fprop(theta, tf.constant(x), StepContext())
        loss = tf.reduce_sum(y**2)
    np.testing.assert_allclose(y, x @ w + b, rtol=1e-12)
    gradient = tape.gradient(loss, theta)
    np.testing.assert_allclose(gradient.w, np.einsum("bti,bto->io", x, 2 * (x @ w + b)), rtol=1e-10)
    if use_bias:
        np.testing.assert_allclose(gradient.b, 2 * (x @ w + b).sum((0, 1)), rtol=1e-10)


def test_activation_is_applied_after_the_bias() -> None:
    params = Linear.Params(input_dim=1, output_dim=2, activation="relu", init=Constant.Params())
    layer = params.instantiate()
    theta = layer.theta({"w": tf.zeros([1, 2]), "b": tf.constant([-1.0, 2.0])})
    np.testing.assert_array_equal(layer.fprop(theta, tf.ones([1, 1]), StepContext()), [[0, 2]])


def test_weights_and_dims() -> None:
    specs = Linear.Params(input_dim=3, output_dim=5).instantiate().specs()
    assert {k: (s.shape, s.dims) for k, s in specs.items()} == {
        "w": ((3, 5), ("embed", "mlp")),
        "b": ((5,), ("mlp",)),
    }
    specs = Linear.Params(input_dim=3, output_dim=5, dims=("mlp", None)).instantiate().specs()
    assert (specs["w"].dims, specs["b"].dims) == (("mlp", None), (None,))
    assert list(Linear.Params(input_dim=3, output_dim=5, use_bias=False).instantiate().specs()) == [
        "w"
    ]


def test_first_values_are_glorot_uniform_and_zero() -> None:
    theta = Linear.Params(input_dim=30, output_dim=50).instantiate().init()
    limit = np.sqrt(6 / 80)
    assert 0.95 * limit < np.abs(theta.w).max() <= limit
    np.testing.assert_array_equal(theta.b, np.zeros(50))


def test_another_size_of_the_input_is_refused() -> None:
    layer = Linear.Params(input_dim=3, output_dim=5).instantiate()
    with pytest.raises(ValueError, match=r"x \(2, 4\).*w \(3, 5\)"):
        layer.fprop(layer.init(), tf.ones([2, 4]), StepContext())


def test_an_unknown_activation_is_refused_when_it_is_set() -> None:
    with pytest.raises((TypeError, ValueError), match="relu"):
        Linear.Params(input_dim=3, output_dim=5, activation="rellu")
