"""Rotation of pairs of elements by given angles, for rotary position embeddings."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion


def rotate(x: tf.Tensor, sine: Any, cosine: Any, *, fuse: Fuse = no_fusion) -> tf.Tensor:
    """Rotates each pair (x[i], x[i + H/2]) by an angle, given its sine and cosine.

    The gradient is rotated back. Only sine and cosine are saved for the backward pass.

    Shapes:
      x: [..., H] with H even
      sine, cosine: broadcastable to [..., H/2]; not differentiable
      returns: shape and dtype of x
    """
    sine, cosine = tf.cast(sine, x.dtype), tf.cast(cosine, x.dtype)

    @custom_gradient
    def run(x: tf.Tensor) -> Any:
        y = fuse(_rotated)(x, sine, cosine)
        return y, lambda dy: fuse(_rotated)(dy, -sine, cosine)

    return run(x)


def _rotated(x: tf.Tensor, sine: tf.Tensor, cosine: tf.Tensor) -> tf.Tensor:
    last = len(x.shape) - 1
    first, second = tf.split(x, 2, last)
    return tf.concat([first * cosine - second * sine, second * cosine + first * sine], last)
