"""Dropout with a counter-hash mask, which is recomputed in the backward pass instead of saved."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion


def dropout(
    x: tf.Tensor,
    key: tf.Tensor,
    example_offset: tf.Tensor | int,
    *,
    rate: float,
    fuse: Fuse = no_fusion,
) -> tf.Tensor:
    """Sets elements of x to 0 with probability `rate` and scales the others by 1 / (1 - rate).

    Shapes:
      x: [examples, …], key: [] uint32
      returns: shape and dtype of x
    Source: Srivastava et al. 2014.
    """
    offset = tf.cast(example_offset, tf.uint32)
    masked = fuse(_masked, rate=rate)

    @custom_gradient
    def run(x: tf.Tensor) -> Any:
        return masked(x, key, offset), lambda dy: masked(dy, key, offset)

    return run(x)


def _masked(x: tf.Tensor, key: tf.Tensor, offset: tf.Tensor, *, rate: float) -> tf.Tensor:
    return x * tf.cast(counter_hash.keep_mask(key, rate, x.shape.as_list(), offset), x.dtype)
