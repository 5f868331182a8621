"""Tables with more rows than there are tokens, so that a vocabulary divides over devices.

The rows that stand for no token have a score of -1e9: no probability, and no gradient. So a padded
model gives the numbers of the one that is not.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

ROWS_DOC = "The rows of the table are padded to a multiple of this (no token has the further ones)."

_NEVER = -1e9


def padded_rows(vocab_size: int, multiple: int, name: str) -> int:
    """Returns the rows of a table for `vocab_size` tokens.

    Raises:
      ValueError: the multiple is less than 1.
    """
    if multiple < 1:
        raise ValueError(f"{name}: vocab_multiple is {multiple}, want at least 1")
    return -(-vocab_size // multiple) * multiple


def padding_bias(
    vocab_size: int, rows: int, *, label_smoothing: float = 0.0, name: str = ""
) -> tf.Tensor | None:
    """Returns what is added to the scores of all rows, or None where nothing is padded.

    Shapes:
      returns: [rows] float32
    Raises:
      ValueError: label smoothing, which would give the padding a share.
    """
    if rows == vocab_size:
        return None
    if label_smoothing:
        raise ValueError(
            f"{name}: label_smoothing {label_smoothing} with {rows - vocab_size} rows of padding "
            "has no form: set vocab_multiple=1, or no label smoothing"
        )
    return tf.constant(np.where(np.arange(rows) < vocab_size, 0.0, _NEVER).astype(np.float32))
