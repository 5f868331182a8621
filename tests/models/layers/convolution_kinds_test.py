"""Separable, transposed and 1-D convolutions against NumPy and the transpose of a convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.convolution import Conv2D, DepthwiseConv2D, SeparableConv2D
from tekso.models.layers.convolution_1d import Conv1D
from tekso.models.layers.convolution_3d import Conv3D
from tekso.models.layers.convolution_transpose import ConvTranspose2D
from tekso.models.layers.convolution_transpose_3d import ConvTranspose3D

X = np.random.default_rng(0).normal(size=(2, 5, 4, 3))


def test_separable_is_depthwise_then_pointwise() -> None:
    shared = {"input_dim": 3, "strides": (2, 2), "dtype": "float64"}
    layer = SeparableConv2D.Params(output_dim=4, multiplier=2, **shared).instantiate()
    assert {path: s.shape for path, s in layer.specs().items()} == {
        "depthwise/w": (3, 3, 3, 2),
        "pointwise/w": (1, 1, 6, 4),
        "pointwise/b": (4,),
    }
    assert layer.output_size(5, 4) == (3, 2)
    theta = layer.init(0)
    depthwise = DepthwiseConv2D.Params(multiplier=2, use_bias=False, **shared).instantiate()
    y = depthwise.fprop(theta.depthwise, tf.constant(X), StepContext()).numpy()
    found = layer.fprop(theta, tf.constant(X), StepContext())
    np.testing.assert_allclose(found, y @ theta.pointwise.w.numpy()[0, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (4, 4), (1, 1), (5, 2), (7, 3)])
@pytest.mark.parametrize("strides", [(2, 2), (1, 3)])
def test_transposed_is_the_gradient_of_a_convolution(kernel: Any, strides: Any) -> None:
    layer = ConvTranspose2D.Params(
        input_dim=3, output_dim=2, kernel_shape=kernel, strides=strides, dtype="float64"
    ).instantiate()
    theta = layer.init(0)
    theta["b"] = tf.constant([1.0, -2.0], tf.float64)
    found = layer.fprop(theta, tf.constant(X), StepContext())
    size = (2, 5 * strides[0], 4 * strides[1], 2)
    # The convolution whose transpose it is maps images of the new size to the size of X.
    conv = Conv2D.Params(
        input_dim=2, output_dim=3, kernel_shape=kernel, strides=strides, use_bias=False
    ).instantiate()
    w = conv.theta({"w": tf.transpose(theta.w, [0, 1, 3, 2])})
    large = tf.zeros(size, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(large)
        y = tf.reduce_sum(conv.fprop(w, large, StepContext()) * X)
    wanted = tape.gradient(y, large) + theta.b
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kernel", [(2, 3, 1), (3, 2, 4), (5, 4, 2)])
def test_transposed_of_volumes_is_the_gradient_of_a_convolution(kernel: Any) -> None:
    strides = (2, 3, 1)
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 2, 3))
    layer = ConvTranspose3D.Params(
        input_dim=3, output_dim=2, kernel_shape=kernel, strides=strides, dtype="float64"
    ).instantiate()
    theta = layer.init(0)
    theta["b"] = tf.constant([1.0, -2.0], tf.float64)
    found = layer.fprop(theta, tf.constant(x), StepContext())
    conv = Conv3D.Params(
        input_dim=2, output_dim=3, kernel_shape=kernel, strides=strides, use_bias=False
    ).instantiate()
    w = conv.theta({"w": tf.transpose(theta.w, [0, 1, 2, 4, 3])})
    large = tf.zeros((2, 6, 12, 2, 2), tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(large)
        y = tf.reduce_sum(conv.fprop(w, large, StepContext()) * x)
    wanted = tape.gradient(y, large) + theta.b
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("padding", ["SAME", "VALID", "CAUSAL"])
def test_conv_1d_is_a_sum_over_the_window(padding: Any) -> None:
    x = X[:, :, 0]  # [2, 5, 3]
    layer = Conv1D.Params(
        input_dim=3, output_dim=2, kernel_size=2, dilation=2, padding=padding, dtype="float64"
    ).instantiate()
    theta = layer.init(0)
    before, after = {"SAME": (1, 1), "VALID": (0, 0), "CAUSAL": (2, 0)}[padding]
    padded = np.pad(x, [(0, 0), (before, after), (0, 0)])
    w = theta.conv.w.numpy()[:, 0]
    wanted = padded[:, :-2] @ w[0] + padded[:, 2:] @ w[1]
    found = layer.fprop(theta, tf.constant(x), StepContext())
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_conv_1d_with_strides_and_groups() -> None:
    x = np.random.default_rng(1).normal(size=(2, 7, 4))
    params = {"input_dim": 4, "output_dim": 6, "kernel_size": 3, "num_groups": 2}
    layer = Conv1D.Params(stride=2, dtype="float64", **params).instantiate()
    theta = layer.init(0)
    w, padded = theta.conv.w.numpy()[:, 0], np.pad(x, [(0, 0), (1, 1), (0, 0)])
    parts = []
    for g in range(2):
        part = padded[..., 2 * g : 2 * g + 2]
        own = w[..., 3 * g : 3 * g + 3]
        parts.append(sum(part[:, k : k + 7] @ own[k] for k in range(3))[:, ::2])
    found = layer.fprop(theta, tf.constant(x), StepContext())
    np.testing.assert_allclose(found, np.concatenate(parts, -1), rtol=1e-9, atol=1e-12)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"strides \(0, 1\)"):
        ConvTranspose2D.Params(input_dim=3, output_dim=2, strides=(0, 1)).instantiate()
    layer = ConvTranspose2D.Params(input_dim=4, output_dim=2).instantiate()
    with pytest.raises(ValueError, match="input_dim, 4"):
        layer.fprop(layer.init(0), tf.constant(X), StepContext())
