"""Attention masks: True where a query attends to a key.

A mask is broadcastable to [batch, heads, queries, keys]. It is a NumPy constant if it depends only
on positions known at tracing, and a tensor if it depends on the batch or is large.

Legend: B batch, T queries, S keys.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import tensorflow as tf

Array: TypeAlias = np.ndarray | tf.Tensor

MOST_ELEMENTS = 2**30
"""Largest number of elements that a layer computes from positions."""

_MOST_CONSTANT = 2**24
"""Largest number of elements of a mask that is a constant: larger ones are computed in the step.
Each layer has a constant of its own, and tracing copies it several times."""


def by_position(
    query_positions: Array,
    key_positions: Array,
    *,
    causal: bool,
    window: int | None = None,
    prefix: int = 0,
) -> Array | None:
    """Returns the mask given by distances; None if nothing is masked.

    Args:
      query_positions: position of every query.
      key_positions: position of every key.
      causal: hides keys after the query.
      window: hides keys that are `window` or more positions away.
      prefix: keys before this position are never hidden.

    Shapes:
      query_positions: [T] or [B, T] int, key_positions: [S] or [B, S] int
      returns: [1 or B, 1, T, S] bool; a NumPy array if the positions are, and the mask is not large
    Raises:
      ValueError: window is less than 1, so a query would not even attend to itself.
    """
    if not causal and window is None:
        return None
    seen = _seen(query_positions, key_positions, causal, window)
    if prefix:
        expand = np.expand_dims if isinstance(seen, np.ndarray) else tf.expand_dims
        seen = seen | expand(key_positions < prefix, -2)
    return _with_heads(seen)


def causal(num_queries: int, num_keys: int | None = None, *, window: int | None = None) -> Array:
    """Returns the causal mask: a query attends to itself and earlier keys.

    Shapes:
      returns: [1, 1, T, S] bool, NumPy if it is not large
    """
    queries = np.arange(num_queries)
    keys = queries if num_keys is None else np.arange(num_keys)
    return _with_heads(_seen(queries, keys, True, window))


def check_size(of_rows: str, rows: int, of_columns: str, columns: int) -> None:
    """Checks the size of an array before it is computed.

    Args:
      of_rows: what each row is for.
      rows: number of rows.
      of_columns: what each column is for.
      columns: number of columns.

    Raises:
      ValueError: the array has more than `MOST_ELEMENTS` elements.
    """
    if rows * columns > MOST_ELEMENTS:
        raise ValueError(
            f"an array with a row for each {of_rows} and a column for each {of_columns}, "
            f"{rows:,} × {columns:,}, is too large for a graph: layers compute at most "
            f"{MOST_ELEMENTS:,} elements from positions. Use shorter sequences"
        )


def distances(query_positions: Array, key_positions: Array) -> Array:
    """Returns query position minus key position for every query and key.

    Shapes:
      query_positions: [T] or [B, T] int, key_positions: [S] or [B, S] int
      returns: [T, S] or [B, T, S] int; a NumPy array if the positions are, and it is not large
    Raises:
      ValueError: there are more than `MOST_ELEMENTS` known pairs.
    """
    queries, keys = _aligned(query_positions, key_positions)
    return queries - keys


def padding(is_token: tf.Tensor) -> tf.Tensor:
    """Returns the mask that hides padding keys from all queries.

    Shapes:
      is_token: [B, S] bool, or weights that are 0 for padding
      returns: [B, 1, 1, S] bool
    """
    seen = is_token if is_token.dtype == tf.bool else tf.not_equal(is_token, 0)
    return tf.expand_dims(tf.expand_dims(seen, 1), 1)


def segments(query_ids: tf.Tensor, key_ids: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the mask of packed texts: a query attends only to keys of its own segment.

    Segment 0 is padding: it attends to nothing, and nothing attends to it.

    Shapes:
      query_ids: [B, T] int, key_ids: [B, S] int; by default query_ids
      returns: [B, 1, T, S] bool
    """
    key_ids = query_ids if key_ids is None else key_ids
    keys = tf.expand_dims(key_ids, -2)
    return _with_heads(tf.equal(tf.expand_dims(query_ids, -1), keys) & tf.not_equal(keys, 0))


def tokens(mask: Array | None, length: int) -> Array | None:
    """Returns which elements are tokens: elements that a mask hides from themselves are padding.

    Shapes:
      mask: broadcastable to [B, heads, T, T] bool, with T = length
      returns: [1 or B, T] bool, True if an element attends to itself in some head; None for no mask
    """
    if mask is None:
        return None
    queries, keys = _aligned(np.arange(length), np.arange(length))
    itself = _with_heads(queries == keys)
    if isinstance(mask, np.ndarray) and isinstance(itself, np.ndarray):
        return np.any(mask & itself, axis=(1, 3))
    return tf.reduce_any(tensor(mask) & itself, [1, 3])


def combine(*masks: Array | None) -> Array | None:
    """Returns the logical and of all masks; None (nothing is masked) if all are None."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    # Constants first: combining them gives a constant.
    given.sort(key=lambda mask: not isinstance(mask, np.ndarray))
    seen = given[0]
    for mask in given[1:]:
        both_known = isinstance(seen, np.ndarray) and isinstance(mask, np.ndarray)
        seen = np.logical_and(seen, mask) if both_known else tf.logical_and(tensor(seen), mask)
    return seen


def tensor(mask: Array) -> tf.Tensor:
    """Converts a mask to a tensor; int8 constants are much faster in TensorFlow than bool ones."""
    return tf.cast(mask.astype(np.int8), tf.bool) if isinstance(mask, np.ndarray) else mask


def _seen(query_positions: Array, key_positions: Array, causal: bool, window: int | None) -> Array:
    """Returns whether a query attends to a key: [T, S] or [B, T, S]."""
    if window is not None and window < 1:
        raise ValueError(f"attention window is {window}, must be at least 1 (the query itself)")
    # Positions are compared, since their differences take four times the memory of a mask.
    queries, keys = _aligned(query_positions, key_positions)
    if window is None:
        return keys <= queries
    last = queries if causal else queries + (window - 1)
    return (keys <= last) & (keys > queries - window)


def _aligned(query_positions: Array, key_positions: Array) -> tuple[Array, Array]:
    """Returns positions that broadcast against each other: [(B,) T, 1] and [(B,) 1, S].

    NumPy arrays if both are and have few pairs, else tensors.
    """
    queries, keys = query_positions, key_positions
    is_constant = isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray)
    if is_constant:
        check_size("query", queries.size, "key", keys.shape[-1])
        is_constant = queries.size * keys.shape[-1] <= _MOST_CONSTANT
    if is_constant:
        return np.expand_dims(queries, -1), np.expand_dims(keys, -2)
    queries, keys = (tf.cast(p, tf.int32) for p in (queries, keys))
    return tf.expand_dims(queries, -1), tf.expand_dims(keys, -2)


def _with_heads(seen: Array) -> Array:
    """Adds the dims of batch and heads: [T, S] or [B, T, S] -> [1 or B, 1, T, S]."""
    expand = np.expand_dims if isinstance(seen, np.ndarray) else tf.expand_dims
    seen = expand(seen, -3)
    return seen if len(seen.shape) == 4 else expand(seen, 0)
