"""Vocabulary tables padded with extra rows, so that they can be sharded evenly over devices.

Padding rows have a score of -1e9, so they have no probability and no gradient. A padded model gives
the same results as one without padding.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

ROWS_DOC = "The rows of the table are padded to a multiple of this; padding rows have no token."

_NEVER = -1e9


def padded_rows(vocab_size: int, multiple: int, name: str) -> int:
    """Returns the rows of a table for `vocab_size` tokens.

    Raises:
      ValueError: the multiple is less than 1.
    """
    if multiple < 1:
        raise ValueError(f"{name}: vocab_multiple is {multiple}, must be at least 1")
    return -(-vocab_size // multiple) * multiple


def padding_bias(vocab_size: int, rows: int) -> tf.Tensor | None:
    """Returns the bias of the scores of all rows, -1e9 for padding; None without padding.

    Shapes:
      returns: [rows] float32
    """
    if rows == vocab_size:
        return None
    return tf.constant(np.where(np.arange(rows) < vocab_size, 0.0, _NEVER).astype(np.float32))
