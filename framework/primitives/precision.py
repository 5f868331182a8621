"""Precision: sums, softmaxes and statistics are computed in at least float32."""

from __future__ import annotations

import tensorflow as tf


def widen(x: tf.Tensor) -> tf.Tensor:
    """Casts x to float32; float64 is unchanged."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
