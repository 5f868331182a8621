"""Layer norm and RMS norm over the last dim, with gradients computed from the normalised input."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.precision import widen


def layer_norm(
    x: tf.Tensor,
    scale: tf.Tensor,
    bias: tf.Tensor | None,
    *,
    epsilon: float,
    fuse: Fuse = no_fusion,
) -> tf.Tensor:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias over the last dim.

    Statistics are computed in float32 (float64 for float64 inputs).

    Shapes:
      x: [..., dim], scale, bias: [dim]
      returns: [..., dim], dtype of x
    Source: Ba et al. 2016, eq. 4.
    """

    @custom_gradient
    def run(x: tf.Tensor, scale: tf.Tensor, *bias: tf.Tensor) -> Any:
        y, normalised, inverse = fuse(_layer_norm_forward, epsilon=epsilon)(x, scale, *bias)

        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            gradients = fuse(_layer_norm_backward)(dy, normalised, inverse, scale)
            return list(gradients[: 2 + len(bias)])

        return y, grad

    return run(x, scale, *([] if bias is None else [bias]))


def _layer_norm_forward(x: tf.Tensor, scale: tf.Tensor, *bias: tf.Tensor, epsilon: float) -> Any:
    wide = widen(x)
    centred = wide - _mean(wide)
    inverse = tf.math.rsqrt(_mean(centred * centred) + epsilon)
    normalised = centred * inverse
    y = normalised * tf.cast(scale, wide.dtype)
    if bias:
        y += tf.cast(bias[0], wide.dtype)
    return tf.cast(y, x.dtype), normalised, inverse


def _layer_norm_backward(
    dy: tf.Tensor, normalised: tf.Tensor, inverse: tf.Tensor, scale: tf.Tensor
) -> Any:
    wide = tf.cast(dy, normalised.dtype)
    d = wide * tf.cast(scale, wide.dtype)
    dx = (d - _mean(d) - normalised * _mean(d * normalised)) * inverse
    outer = list(range(dy.shape.rank - 1))
    dscale = tf.reduce_sum(wide * normalised, outer)
    dbias = tf.reduce_sum(wide, outer)
    return [tf.cast(dx, dy.dtype), tf.cast(dscale, scale.dtype), tf.cast(dbias, scale.dtype)]


def rms_norm(
    x: tf.Tensor, scale: tf.Tensor, *, epsilon: float, fuse: Fuse = no_fusion
) -> tf.Tensor:
    """Returns x / sqrt(mean(x**2) + epsilon) * scale over the last dim.

    Shapes:
      x: [..., dim], scale: [dim]
      returns: [..., dim], dtype of x
    Source: Zhang & Sennrich 2019, eq. 4.
    """

    @custom_gradient
    def run(x: tf.Tensor, scale: tf.Tensor) -> Any:
        y, normalised, inverse = fuse(_rms_norm_forward, epsilon=epsilon)(x, scale)

        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            return list(fuse(_rms_norm_backward)(dy, normalised, inverse, scale))

        return y, grad

    return run(x, scale)


def _rms_norm_forward(x: tf.Tensor, scale: tf.Tensor, *, epsilon: float) -> Any:
    wide = widen(x)
    inverse = tf.math.rsqrt(_mean(wide * wide) + epsilon)
    normalised = wide * inverse
    return tf.cast(normalised * tf.cast(scale, wide.dtype), x.dtype), normalised, inverse


def _rms_norm_backward(
    dy: tf.Tensor, normalised: tf.Tensor, inverse: tf.Tensor, scale: tf.Tensor
) -> Any:
    wide = tf.cast(dy, normalised.dtype)
    d = wide * tf.cast(scale, wide.dtype)
    dx = (d - normalised * _mean(d * normalised)) * inverse
    dscale = tf.reduce_sum(wide * normalised, list(range(dy.shape.rank - 1)))
    return [tf.cast(dx, dy.dtype), tf.cast(dscale, scale.dtype)]


def _mean(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(x, -1, keepdims=True)
