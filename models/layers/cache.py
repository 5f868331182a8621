"""Writing new keys and values into a cache of fixed size, at a position that the program computes.

Legend: B batch, T new elements, S size of the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def positions_of_block(position: Any, length: int) -> tf.Tensor:
    """Returns the positions of `length` elements of which the first is at `position`.

    Shapes:
      position: [] or [B] int
      returns: [T] or [B, T] int32
    """
    first = tf.expand_dims(tf.cast(position, tf.int32), -1)
    return first + tf.range(length, dtype=tf.int32)


def positions_at(positions: Any, places: tf.Tensor) -> tf.Tensor:
    """Returns the positions of some places of a cache, where they are not the places themselves.

    Shapes:
      positions: [S] or [B, S] int, places: [T] or [B, T] int
      returns: [T] or [B, T] int
    """
    positions = tf.convert_to_tensor(positions)
    both = positions.shape.rank == places.shape.rank == 2
    return tf.gather(positions, places, axis=-1, batch_dims=int(both))


def write(buffer: tf.Tensor, block: tf.Tensor, position: Any) -> tf.Tensor:
    """Returns the buffer with a block of elements written from `position` on.

    A select between the old and the gathered new elements: it needs no scatter, so it works alike
    in every layout, and costs less than the attention that reads the whole buffer afterwards.

    Shapes:
      buffer: [B, S, ...], block: [B, T, ...], position: [] or [B] int
      returns: [B, S, ...], dtype of buffer
    """
    size, length = buffer.shape[1], block.shape[1]
    first = tf.expand_dims(tf.cast(position, tf.int32), -1)
    index = tf.constant(np.arange(size, dtype=np.int32)) - first  # of every place in the block
    is_new = (index >= 0) & (index < length)
    index = tf.clip_by_value(index, 0, length - 1)
    if length == 1:
        placed = block  # broadcast over all places
    elif index.shape.rank == 1:
        placed = tf.gather(block, index, axis=1)
    else:
        placed = tf.gather(block, index, axis=1, batch_dims=1)
    is_new = tf.reshape(is_new, [-1, size] + [1] * (buffer.shape.rank - 2))
    return tf.where(is_new, tf.cast(placed, buffer.dtype), buffer)
