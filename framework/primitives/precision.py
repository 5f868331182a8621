"""Precision: sums, softmaxes and statistics are computed in float32 at least."""

from __future__ import annotations

import tensorflow as tf


def widen(x: tf.Tensor) -> tf.Tensor:
    """Returns x in float32, or as it is if it is float64."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
