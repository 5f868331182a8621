"""Precision: sums, softmaxes and statistics are computed in at least float32."""

from __future__ import annotations

import tensorflow as tf


def widen_half(x: tf.Tensor) -> tf.Tensor:
    """Casts x to float32 if it is float16; bfloat16 has the range of float32.

    For products with probabilities: those of a large vocabulary, times the weight of a position,
    are smaller than the smallest float16 number.
    """
    return tf.cast(x, tf.float32) if x.dtype == tf.float16 else x


def widen(x: tf.Tensor) -> tf.Tensor:
    """Casts x to float32; float64 and complex numbers are unchanged."""
    dtype = tf.as_dtype(x.dtype)  # of a tensor or an array
    return x if dtype == tf.float64 or dtype.is_complex else tf.cast(x, tf.float32)
