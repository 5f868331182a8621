"""Feed-forward layers, plain and gated, against their formulas in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.models.layers.feed_forward import FeedForward, FeedForwardBase, GatedFeedForward

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "identity": lambda x: x,
}


def random_theta(layer: Layer) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=spec.shape) for path, spec in layer.specs().items()}


def run(layer: Layer, weights: dict[str, np.ndarray], x: np.ndarray, ctx: StepContext) -> tf.Tensor:
    theta = layer.theta({path: tf.constant(w) for path, w in weights.items()})
    return layer.fprop(theta, tf.constant(x), ctx)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_is_two_projections(activation: str, use_bias: bool) -> None:
    params = FeedForward.Params(input_dim=3, hidden_dim=5, activation=activation, use_bias=use_bias)
    layer = params.instantiate()
    w = random_theta(layer)
    x = np.random.default_rng(1).normal(size=(2, 4, 3))
    h = ACTIVATIONS[activation](x @ w["hidden/w"] + w.get("hidden/b", 0))
    expected = h @ w["output/w"] + w.get("output/b", 0)
    np.testing.assert_allclose(run(layer, w, x, StepContext()), expected, rtol=1e-10)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_multiplies_by_the_activated_gate(activation: str, use_bias: bool) -> None:
    params = GatedFeedForward.Params(
        input_dim=3, hidden_dim=5, activation=activation, use_bias=use_bias
    )
    layer = params.instantiate()
    w = random_theta(layer)
    x = np.random.default_rng(1).normal(size=(2, 4, 3))
    gate = ACTIVATIONS[activation](x @ w["gate/w"] + w.get("gate/b", 0))
    h = gate * (x @ w["hidden/w"] + w.get("hidden/b", 0))
    expected = h @ w["output/w"] + w.get("output/b", 0)
    np.testing.assert_allclose(run(layer, w, x, StepContext()), expected, rtol=1e-10)


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
@pytest.mark.parametrize("hidden_dim", [5, 3])  # also where both sizes are equal
def test_weights_and_dims(kind: type[FeedForwardBase], hidden_dim: int) -> None:
    layer = kind.Params(input_dim=3, hidden_dim=hidden_dim, use_bias=True).instantiate()
    found = {path: (spec.shape, spec.dims) for path, spec in layer.specs().items()}
    wide = {"w": ((3, hidden_dim), ("embed", "mlp")), "b": ((hidden_dim,), ("mlp",))}
    narrow = {"w": ((hidden_dim, 3), ("mlp", "embed")), "b": ((3,), ("embed",))}
    expected = {"hidden": wide, "output": narrow} | (
        {"gate": wide} if kind is GatedFeedForward else {}
    )
    assert found == theta_lib.flatten(expected)


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
def test_dropout_acts_on_the_hidden_layer_in_training(kind: type[FeedForwardBase]) -> None:
    params = kind.Params(input_dim=3, hidden_dim=5, use_bias=False, activation="identity")
    layer = params.set(dropout_rate=0.5).instantiate()
    w = random_theta(layer)
    x = np.random.default_rng(1).normal(size=(2, 4, 3))
    ctx = StepContext(mode="train", seed=2)
    mask = np.float64(ops.dropout(ctx, tf.ones([2, 4, 5]), 0.5, layer.dropout))
    assert 0 < (mask == 0).mean() < 1
    h = mask * (x @ w["hidden/w"])
    if kind is GatedFeedForward:
        h *= x @ w["gate/w"]
    np.testing.assert_allclose(run(layer, w, x, ctx), h @ w["output/w"], rtol=1e-10)
    assert layer.dropout.path == "dropout"


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
def test_children_take_over_init_and_dtype(kind: type[FeedForwardBase]) -> None:
    params = kind.Params(input_dim=3, hidden_dim=5, dtype="bfloat16").set({"init.scale": 0.0})
    layer = params.instantiate()
    theta = theta_lib.flatten(layer.init())
    assert all(t.dtype == tf.bfloat16 for t in theta.values())
    assert all(float(tf.reduce_max(abs(t))) == 0 for t in theta.values())
