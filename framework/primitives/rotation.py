"""Rotation of pairs of dims by given angles: the core of rotary positions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.fusion import Fuse, no_fusion


def rotate(x: tf.Tensor, sine: Any, cosine: Any, *, fuse: Fuse = no_fusion) -> tf.Tensor:
    """Rotates each pair (x[i], x[i + H/2]) by the angle whose sine and cosine are given.

    Its gradient is the rotation back; nothing is kept but sine and cosine.

    Shapes:
      x: [..., H] with H even
      sine, cosine: broadcastable to [..., H/2]; get no gradient
      returns: shape and dtype of x
    """
    sine, cosine = tf.cast(sine, x.dtype), tf.cast(cosine, x.dtype)

    @tf.custom_gradient
    def run(x: tf.Tensor) -> Any:
        turned = fuse(_rotated)(x, sine, cosine)
        return turned, lambda dy: fuse(_rotated)(dy, -sine, cosine)

    return run(x)


def _rotated(x: tf.Tensor, sine: tf.Tensor, cosine: tf.Tensor) -> tf.Tensor:
    first, second = tf.split(x, 2, -1)
    return tf.concat([first * cosine - second * sine, second * cosine + first * sine], -1)
