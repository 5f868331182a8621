"""Layers give what Keras's give with the weights that docs/keras_and_pytorch.md says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.optimizers.adam import Adam, AdamW
from tekso.framework.theta import unflatten
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import BatchNorm, LayerNorm, Norm
from tekso.models.layers.recurrent import Recurrent
from tekso.models.layers.recurrent_cells import LstmCell

os.environ.setdefault("KERAS_BACKEND", "tensorflow")


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras, which takes two seconds to import."""
    return pytest.importorskip("keras")


def weights_of(layer: Any) -> dict[str, np.ndarray]:
    """The weights of a Keras layer by their names, set to random numbers (variances positive)."""
    rng = np.random.default_rng(0)
    layer.set_weights([0.5 + rng.random(weight.shape) for weight in layer.weights])
    return {weight.name: np.asarray(weight) for weight in layer.weights}


def assert_same(
    layer: Layer.Params, theta: Mapping[str, np.ndarray], inputs: tuple[Any, ...], expected: Any
) -> None:
    built = layer.instantiate()
    assert {path: spec.shape for path, spec in built.specs().items()} == {
        path: weight.shape for path, weight in theta.items()
    }
    outputs = built.fprop(unflatten(theta), *inputs, StepContext(mode="eval"))
    np.testing.assert_allclose(outputs, expected, rtol=2e-5, atol=2e-5)


def x_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def test_linear(keras: Any) -> None:
    x, other = x_of(2, 3), keras.layers.Dense(5)
    other.build(x.shape)
    theirs = weights_of(other)
    ours = {"w": theirs["kernel"], "b": theirs["bias"]}
    assert_same(Linear.Params(input_dim=3, output_dim=5), ours, (x,), other(x))


def test_embedding(keras: Any) -> None:
    ids, other = np.array([[0, 4], [2, 2]]), keras.layers.Embedding(5, 3)
    other.build(ids.shape)
    ours = {"table": weights_of(other)["embeddings"]}
    assert_same(Embedding.Params(vocab_size=5, dim=3), ours, (ids,), other(ids))


def test_convolution(keras: Any) -> None:
    x, other = x_of(2, 6, 5, 3), keras.layers.Conv2D(4, (3, 2), strides=2, padding="same")
    other.build(x.shape)
    theirs = weights_of(other)
    layer = Conv2D.Params(input_dim=3, output_dim=4, kernel_shape=(3, 2), strides=(2, 2))
    ours = {"w": theirs["kernel"], "b": theirs["bias"]}
    assert_same(layer, ours, (x,), other(x))


def test_normalization(keras: Any) -> None:
    x = x_of(4, 3)
    other = keras.layers.LayerNormalization()
    other.build(x.shape)
    theirs = weights_of(other)
    ours = {"scale": theirs["gamma"], "bias": theirs["beta"]}
    assert_same(LayerNorm.Params(dim=3, epsilon=other.epsilon), ours, (x,), other(x))

    other = keras.layers.BatchNormalization()
    other.build(x.shape)
    theirs = weights_of(other)
    ours = {"scale": theirs["gamma"], "bias": theirs["beta"]}
    ours |= {name: theirs[name] for name in ("moving_mean", "moving_variance")}
    assert_same(BatchNorm.Params(dim=3), ours, (x,), other(x, training=False))


def test_lstm(keras: Any) -> None:
    x, other = x_of(2, 4, 3), keras.layers.LSTM(5, return_sequences=True)
    other.build(x.shape)
    theirs = weights_of(other.cell)
    ours = {
        "cell/w_input": theirs["kernel"].reshape(3, 4, 5),
        "cell/w_recurrent": theirs["recurrent_kernel"].reshape(5, 4, 5),
        "cell/b": theirs["bias"].reshape(4, 5),
    }
    layer = Recurrent.Params(cell=LstmCell.Params(input_dim=3, hidden_dim=5, forget_bias=0.0))
    assert_same(layer, ours, (x,), other(x))


def test_attention(keras: Any) -> None:
    x, other = x_of(2, 4, 6), keras.layers.MultiHeadAttention(num_heads=2, key_dim=3)
    other.build(x.shape, x.shape)
    theirs = {weight.path: weight for weight in other.weights}
    ours = {}
    names = {"query": "q", "key": "k", "value": "v", "attention_output": "out"}
    for name, part in names.items():
        for kind, ending in (("kernel", ""), ("bias", "_bias")):
            (path,) = (p for p in theirs if p.endswith(f"{name}/{kind}"))
            theirs[path].assign(x_of(*theirs[path].shape))
            ours[part + ending] = np.asarray(theirs[path])
    layer = MultiHeadAttention.Params(input_dim=6, num_heads=2)
    assert_same(layer, ours, (x,), other(x, x))


def test_defaults_are_as_the_page_says(keras: Any) -> None:
    assert (keras.optimizers.Adam().epsilon, Adam.Params().epsilon) == (1e-7, 1e-8)
    assert (keras.optimizers.AdamW().weight_decay, AdamW.Params().weight_decay) == (0.004, 0.01)
    assert AdamW.Params().weight_decay_scaling == "learning_rate"
    layer_norm, batch_norm = keras.layers.LayerNormalization(), keras.layers.BatchNormalization()
    assert (layer_norm.epsilon, Norm.Params().epsilon) == (1e-3, 1e-6)
    assert (batch_norm.epsilon, BatchNorm.Params().epsilon) == (1e-3, 1e-3)
    assert (batch_norm.momentum, BatchNorm.Params().decay) == (0.99, 0.99)
    assert type(keras.layers.Dense(3).kernel_initializer).__name__ == "GlorotUniform"
    assert type(Linear.Params().init).__qualname__ == "GlorotUniform.Params"
