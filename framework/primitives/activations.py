"""Activations by name, with custom gradients that save one tensor for the backward pass.

It is the output where that determines the slope: the next layer usually saves it too. Otherwise it
is the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion

Activation = Literal[
    "identity", "relu", "squared_relu", "gelu", "gelu_tanh", "swish", "tanh", "sigmoid"
]
"""The names that `activate` takes, as the type of a Params field."""

NAMES: tuple[str, ...] = get_args(Activation)


def _relu(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x)


def _relu_gradient(dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    gradient: tf.Tensor = tf.raw_ops.ReluGrad(gradients=dy, features=y)
    return gradient


def _squared_relu(x: tf.Tensor) -> tf.Tensor:
    return tf.square(tf.nn.relu(x))


def _squared_relu_slope(x: tf.Tensor) -> tf.Tensor:
    return 2 * tf.nn.relu(x)


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1 + tf.math.erf(x * math.sqrt(0.5)))


def _gelu_slope(x: tf.Tensor) -> tf.Tensor:
    density = tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + tf.math.erf(x * math.sqrt(0.5))) + x * density


_TANH_SCALE = math.sqrt(2 / math.pi)


def _gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1 + tf.tanh(_TANH_SCALE * (x + 0.044715 * x * x * x)))


def _gelu_tanh_slope(x: tf.Tensor) -> tf.Tensor:
    x = tf.clip_by_value(x, -30, 30)  # the slope is 0 or 1 beyond 10; overflow of x * x gives NaN
    t = tf.tanh(_TANH_SCALE * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * 0.044715 * x * x)


def _swish(x: tf.Tensor) -> tf.Tensor:
    return x * tf.sigmoid(x)


def _swish_slope(x: tf.Tensor) -> tf.Tensor:
    s = tf.sigmoid(x)
    return s * (1 + x * (1 - s))


def _tanh_gradient(dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    gradient: tf.Tensor = tf.raw_ops.TanhGrad(dy=dy, y=y)
    return gradient


def _sigmoid_gradient(dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    gradient: tf.Tensor = tf.raw_ops.SigmoidGrad(dy=dy, y=y)
    return gradient


_OF_OUTPUT: dict[str, tuple[Callable[..., tf.Tensor], ...]] = {
    "relu": (_relu, _relu_gradient),
    "tanh": (tf.tanh, _tanh_gradient),
    "sigmoid": (tf.sigmoid, _sigmoid_gradient),
}
"""{name: (function, its gradient from that of the output and the output)}.

The gradients are one op each: a slope of its own would be computed in the forward pass, and saved.
"""

_OF_INPUT: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], ...]] = {
    "squared_relu": (_squared_relu, _squared_relu_slope),  # So et al. 2021, "Primer"
    "gelu": (_gelu, _gelu_slope),  # Hendrycks & Gimpel 2016
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),  # its approximation by tanh, as in GPT-2
    "swish": (_swish, _swish_slope),  # Ramachandran et al. 2017; also called SiLU
}
"""{name: (function, its slope from the input)}."""


def activate(name: str, x: tf.Tensor, *, fuse: Fuse = no_fusion) -> tf.Tensor:
    """Applies the activation `name` to every element.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"activation {name!r} is unknown; there are {', '.join(NAMES)}")
    if name == "identity":
        return x

    @custom_gradient
    def run(x: tf.Tensor) -> Any:
        y = fuse(_forward, name=name)(x)
        saved = y if name in _OF_OUTPUT else x
        return y, lambda dy: fuse(_backward, name=name)(dy, saved)

    return run(x)


def _forward(x: tf.Tensor, *, name: str) -> tf.Tensor:
    function, _ = (_OF_OUTPUT | _OF_INPUT)[name]
    return function(x)


def _backward(dy: tf.Tensor, saved: tf.Tensor, *, name: str) -> tf.Tensor:
    if name in _OF_OUTPUT:
        return _OF_OUTPUT[name][1](dy, saved)
    return dy * _OF_INPUT[name][1](saved)
