"""Convolutions against sums over the window in NumPy; weights, dims and fans."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.convolution import Conv2D, DepthwiseConv2D

X = np.random.default_rng(0).normal(size=(2, 7, 6, 4))

WINDOWS: dict[str, dict[str, Any]] = {
    "3x3": {},
    "1x1": {"kernel_shape": (1, 1)},
    "1x1 stride 2": {"kernel_shape": (1, 1), "strides": (2, 2)},
    "2x3 stride 2": {"kernel_shape": (2, 3), "strides": (2, 2)},
    "3x2 strides 1, 2 valid": {"kernel_shape": (3, 2), "strides": (1, 2), "padding": "VALID"},
    "dilated": {"dilations": (2, 1)},
    "dilated valid": {"kernel_shape": (2, 3), "dilations": (3, 2), "padding": "VALID"},
    "7x1": {"kernel_shape": (7, 1)},
    "fixed padding": {"kernel_shape": (3, 4), "strides": (2, 2), "padding": "FIXED"},
    "fixed padding, dilated": {"strides": (2, 3), "dilations": (2, 2), "padding": "FIXED"},
}


def patches(x: np.ndarray, params: Any) -> np.ndarray:
    """Returns what every window holds: [B, new H, new W, kernel H, kernel W, C]."""
    columns = []
    for d in (0, 1):
        size, k = x.shape[1 + d], params.kernel_shape[d]
        stride, dilation = params.strides[d], params.dilations[d]
        reach = dilation * (k - 1) + 1
        if params.padding == "SAME":
            count = math.ceil(size / stride)
            missing = max((count - 1) * stride + reach - size, 0)
            pad = (missing // 2, missing - missing // 2)
        elif params.padding == "FIXED":
            pad = ((reach - 1) // 2, reach - 1 - (reach - 1) // 2)
            count = (size + reach - 1 - reach) // stride + 1
        else:
            count, pad = (size - reach) // stride + 1, (0, 0)
        x = np.pad(x, [pad if i == 1 + d else (0, 0) for i in range(4)])
        columns.append(np.arange(count)[:, None] * stride + np.arange(k) * dilation)
    rows, cols = columns
    taken = x[:, rows][:, :, :, cols]  # [B, new H, k H, new W, k W, C]
    return taken.transpose(0, 1, 3, 2, 4, 5)


def random_weights(layer: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {path: rng.normal(size=spec.shape) for path, spec in layer.specs().items()}


def run(layer: Any, weights: dict[str, np.ndarray], x: np.ndarray = X) -> tf.Tensor:
    theta = layer.theta({path: tf.constant(w) for path, w in weights.items()})
    return layer.fprop(theta, tf.constant(x), StepContext())


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("name", WINDOWS)
def test_conv_is_a_sum_over_the_window_and_the_channels_of_its_group(
    name: str, num_groups: int
) -> None:
    params = Conv2D.Params(input_dim=4, output_dim=6, num_groups=num_groups, **WINDOWS[name])
    layer = params.instantiate()
    w = random_weights(layer)
    held = patches(X, layer.params)
    parts = [
        np.einsum("bhwijc,ijcd->bhwd", part, kernel)
        for part, kernel in zip(
            np.split(held, num_groups, -1), np.split(w["w"], num_groups, -1), strict=True
        )
    ]
    y = run(layer, w)
    np.testing.assert_allclose(y, np.concatenate(parts, -1) + w["b"], rtol=1e-9, atol=1e-11)
    assert layer.output_size(7, 6) == tuple(y.shape[1:3])


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("name", WINDOWS)
def test_depthwise_conv_is_a_sum_over_the_window(name: str, multiplier: int) -> None:
    params = DepthwiseConv2D.Params(input_dim=4, multiplier=multiplier, **WINDOWS[name])
    layer = params.instantiate()
    w = random_weights(layer)
    expected = np.einsum("bhwijc,ijcm->bhwcm", patches(X, layer.params), w["w"])
    expected = expected.reshape(*expected.shape[:3], -1) + w["b"]
    y = run(layer, w)
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-11)
    assert layer.output_size(7, 6) == tuple(y.shape[1:3])


@pytest.mark.parametrize("name", ["1x1 stride 2", "2x3 stride 2", "dilated", "fixed padding"])
@pytest.mark.parametrize("kind", [Conv2D, DepthwiseConv2D])
def test_gradients_are_those_of_the_sum(kind: Any, name: str) -> None:
    params = kind.Params(input_dim=4, use_bias=False, **WINDOWS[name])
    if kind is Conv2D:
        params.set(output_dim=6, num_groups=2)
    layer = params.instantiate()
    w = random_weights(layer)["w"]
    weights = np.random.default_rng(2).normal(size=run(layer, {"w": w}).shape)
    theta, x = layer.theta({"w": tf.constant(w)}), tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch((x, theta))
        loss = tf.reduce_sum(layer.fprop(theta, x, StepContext()) * weights)
    found = tape.gradient(loss, [x, theta.w])
    # The layer is linear in both: a directional derivative is the value at the direction.
    rng = np.random.default_rng(3)
    dx, dw = rng.normal(size=X.shape), rng.normal(size=w.shape)
    np.testing.assert_allclose(
        np.sum(found[0] * dx), np.sum(run(layer, {"w": w}, dx) * weights), rtol=1e-10
    )
    np.testing.assert_allclose(
        np.sum(found[1] * dw), np.sum(run(layer, {"w": dw}) * weights), rtol=1e-10
    )


def test_activation_follows_the_bias() -> None:
    params = Conv2D.Params(input_dim=4, output_dim=2, kernel_shape=(1, 1), activation="relu")
    layer = params.instantiate()
    y = run(layer, {"w": np.zeros((1, 1, 4, 2)), "b": np.array([-1.0, 2.0])})
    np.testing.assert_array_equal(y, np.broadcast_to([0.0, 2.0], (2, 7, 6, 2)))


def test_weights_dims_and_fans() -> None:
    conv = Conv2D.Params(input_dim=4, output_dim=6, num_groups=2, kernel_shape=(3, 5))
    specs = conv.instantiate().specs()
    assert {path: (s.shape, s.dims) for path, s in specs.items()} == {
        "w": ((3, 5, 2, 6), (None, None, "in_channels", "out_channels")),
        "b": ((6,), ("out_channels",)),
    }
    assert tuple(specs["w"].fans) == (3 * 5 * 2, 3 * 5 * 3)
    depthwise = DepthwiseConv2D.Params(input_dim=4, multiplier=2, kernel_shape=(3, 5))
    specs = depthwise.instantiate().specs()
    assert {path: (s.shape, s.dims) for path, s in specs.items()} == {
        "w": ((3, 5, 4, 2), (None, None, "channels", None)),
        "b": ((8,), ("channels",)),
    }
    assert tuple(specs["w"].fans) == (15, 30)
    assert list(conv.set(use_bias=False).instantiate().specs()) == ["w"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_groups": 3}, "num_groups 3 must divide input_dim 4 and output_dim 6"),
        ({"num_groups": 4}, "num_groups 4 must divide"),
        ({"num_groups": 0}, "num_groups 0"),
        ({"strides": (0, 1)}, r"strides is \(0, 1\)"),
        ({"kernel_shape": (3, 0)}, "kernel_shape"),
        ({"dilations": (1, -1)}, "dilations"),
    ],
)
def test_what_cannot_be_convolved_is_refused_when_built(
    kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Conv2D.Params(input_dim=4, output_dim=6, **kwargs).instantiate()


@pytest.mark.parametrize("kind", [Conv2D, DepthwiseConv2D])
def test_other_inputs_are_refused(kind: Any) -> None:
    params = kind.Params(input_dim=4, padding="VALID")
    if kind is Conv2D:
        params.output_dim = 6
    layer = params.instantiate()
    with pytest.raises(ValueError, match=r"\(2, 7, 6, 3\), but .* input_dim, 4"):
        layer.fprop(layer.init(), tf.ones([2, 7, 6, 3]), StepContext())
    with pytest.raises(ValueError, match="does not fit in height 2"):
        layer.fprop(layer.init(), tf.ones([2, 2, 6, 4]), StepContext())
