"""Attention masks: True where a query attends to a key.

A mask is broadcastable to [batch, heads, queries, keys]. It is a NumPy constant if it depends only
on positions known at tracing, and a tensor if it depends on the batch.

Legend: B batch, T queries, S keys.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import tensorflow as tf

Array: TypeAlias = np.ndarray | tf.Tensor

MOST_ELEMENTS = 2**30
"""Largest number of elements of a constant that a layer computes from positions: a graph cannot
have more than 2 GB of constants."""


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
      returns: [1 or B, 1, T, S] bool; a NumPy array if the positions are
    Raises:
      ValueError: window is less than 1, so a query would not even attend to itself.
    """
    if not causal and window is None:
        return None
    seen = _within(distances(query_positions, key_positions), causal, window)
    if prefix:
        expand = np.expand_dims if isinstance(seen, np.ndarray) else tf.expand_dims
        seen = seen | expand(key_positions < prefix, -2)
    return _with_heads(seen)


def causal(num_queries: int, num_keys: int | None = None, *, window: int | None = None) -> Array:
    """Returns the causal mask: a query attends to itself and earlier keys.

    Shapes:
      returns: [1, 1, T, S] bool, NumPy
    """
    queries = np.arange(num_queries)
    keys = queries if num_keys is None else np.arange(num_keys)
    return _with_heads(_within(distances(queries, keys), True, window))


def check_size(of_rows: str, rows: int, of_columns: str, columns: int) -> None:
    """Checks the size of a constant before it is allocated.

    Args:
      of_rows: what each row is for.
      rows: number of rows.
      of_columns: what each column is for.
      columns: number of columns.

    Raises:
      ValueError: the constant has more than `MOST_ELEMENTS` elements.
    """
    if rows * columns > MOST_ELEMENTS:
        raise ValueError(
            f"a constant with a row for each {of_rows} and a column for each {of_columns}, "
            f"{rows:,} × {columns:,}, is too large for a graph, which may have {MOST_ELEMENTS:,} "
            "elements in a constant: use shorter sequences"
        )


def distances(query_positions: Array, key_positions: Array) -> Array:
    """Returns query position minus key position for every query and key.

    Shapes:
      query_positions: [T] or [B, T] int, key_positions: [S] or [B, S] int
      returns: [T, S] or [B, T, S] int; a NumPy array if the positions are
    Raises:
      ValueError: the NumPy array would be too large.
    """
    if isinstance(query_positions, np.ndarray) and isinstance(key_positions, np.ndarray):
        check_size("query", query_positions.size, "key", key_positions.shape[-1])
        return np.expand_dims(query_positions, -1) - np.expand_dims(key_positions, -2)
    queries, keys = (tf.cast(p, tf.int32) for p in (query_positions, key_positions))
    return tf.expand_dims(queries, -1) - tf.expand_dims(keys, -2)


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
    itself = np.eye(length, dtype=bool)[np.newaxis, np.newaxis]
    if isinstance(mask, np.ndarray):
        return np.any(mask & itself, axis=(1, 3))
    return tf.reduce_any(mask & tf.constant(itself), [1, 3])


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


def _within(distance: Array, causal: bool, window: int | None) -> Array:
    """Returns whether a query attends to a key `distance` positions before it."""
    if window is None:
        return distance >= 0
    if window < 1:
        raise ValueError(f"attention window is {window}, must be at least 1 (the query itself)")
    return (distance > (-1 if causal else -window)) & (distance < window)


def _with_heads(seen: Array) -> Array:
    """Adds the dims of batch and heads: [T, S] or [B, T, S] -> [1 or B, 1, T, S]."""
    expand = np.expand_dims if isinstance(seen, np.ndarray) else tf.expand_dims
    seen = expand(seen, -3)
    return seen if len(seen.shape) == 4 else expand(seen, 0)
