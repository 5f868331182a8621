"""Vocabulary tables padded with extra rows, so that they can be sharded evenly over devices.

Padding rows have a score of -1e9, so they have no probability and no gradient. A padded model gives
the same results as one without padding.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

ROWS_DOC = "The rows of the table are padded to a multiple of this; padding rows have no token."

_NEVER = -1e9
_NEVER_FLOAT16 = -3e4  # -1e9 would be -inf, and its product with 0 is NaN


def padded_rows(vocab_size: int, multiple: int, name: str) -> int:
    """Returns the rows of a table for `vocab_size` tokens.

    Raises:
      ValueError: the multiple is less than 1.
    """
    if multiple < 1:
        raise ValueError(f"{name}: vocab_multiple is {multiple}, must be at least 1")
    return -(-vocab_size // multiple) * multiple


def padding_bias(vocab_size: int, rows: int, dtype: tf.DType = tf.float32) -> tf.Tensor | None:
    """Returns the bias of the scores of all rows, -1e9 for padding; None without padding.

    In float16 it is -3e4, because -1e9 would be infinite.

    Shapes:
      returns: [rows] of the dtype
    """
    if rows == vocab_size:
        return None
    never = _NEVER_FLOAT16 if dtype == tf.float16 else _NEVER
    return tf.constant(np.where(np.arange(rows) < vocab_size, 0.0, never), dtype)
