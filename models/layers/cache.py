"""A key-value cache of fixed size, written at a position that is a tensor.

The hypotheses of a source share one row of the cache: every position has a slot for each of them.
When a beam search reorders hypotheses, no key is moved. Instead, `slots` records for every
hypothesis and position the slot of its keys and values.

    position  0    1    2              slots of hypothesis 0   [1, 0, 0]
    slot 0    a    b ─► d                       hypothesis 1   [1, 0, 1]
    slot 1    c ──┘└──► e

A step writes the new keys and values, reads the cache once, and moves a few integers. A query is
multiplied with the keys of all slots, and a mask hides the slots of other hypotheses. This is
cheap, because memory reads take more time than the multiplications.

Legend: B rows of the cache, M hypotheses per row, T new elements, S size of the cache, K heads,
H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

KeysAndValues = dict[str, tf.Tensor]


def positions_of_block(position: Any, length: int) -> tf.Tensor:
    """Returns the positions of `length` elements, the first at `position`.

    Shapes:
      position: [] or [B] int
      returns: [T] or [B, T] int32
    """
    first = tf.expand_dims(tf.cast(position, tf.int32), -1)
    return first + tf.range(length, dtype=tf.int32)


def positions_at(positions: Any, places: tf.Tensor) -> tf.Tensor:
    """Returns the positions of the elements at some cache indices.

    Shapes:
      positions: [S] or [B, S] int, places: [T] or [B, T] int, indices in the cache
      returns: [T] or [B, T] int
    """
    positions = tf.convert_to_tensor(positions)
    both = positions.shape.rank == places.shape.rank == 2
    return tf.gather(positions, places, axis=-1, batch_dims=int(both))


def empty(num_rows: int, size: int, num_heads: int, head_dim: int, dtype: str) -> KeysAndValues:
    """Returns an empty cache with one hypothesis per row.

    Shapes:
      returns: {"k", "v": [B, K, S, M, H], "slots": [B * M, S] int32} with M = 1
    """
    shape = [num_rows, num_heads, size, 1, head_dim]
    keys_and_values = {name: tf.zeros(shape, dtype) for name in ("k", "v")}
    return {**keys_and_values, "slots": _own_slots(num_rows, size, 1)}


def size_of(cache: KeysAndValues) -> int:
    """Returns the size of the cache, S."""
    return int(cache["k"].shape[2])


def num_hypotheses(cache: KeysAndValues) -> int:
    """Returns the number of hypotheses per row, M."""
    return int(cache["k"].shape[3])


def write(
    cache: KeysAndValues,
    k: tf.Tensor,
    v: tf.Tensor,
    position: Any,
    *,
    fill: Callable[..., tf.Tensor] = tf.tensor_scatter_nd_update,
) -> KeysAndValues:
    """Returns the cache with a block of keys and values written from `position`.

    The cache must have room for the block. `fill` writes rows of a buffer. `ops.fill_rows` assumes
    that the rows are empty.

    Shapes:
      k, v: [B * M, T, K, H], position: [], or [B] if M is 1, int
    Raises:
      ValueError: M > 1, and there are several elements or several positions.
    """
    m, position = num_hypotheses(cache), tf.cast(position, tf.int32)
    if m > 1 and (k.shape[1] > 1 or position.shape.rank):
        raise ValueError(
            f"a cache with {m} hypotheses per row takes one element of each at one position, got "
            f"{k.shape[1]} elements at positions of shape {position.shape}"
        )
    cache = {
        **cache,
        "k": _written(cache["k"], k, position, fill),
        "v": _written(cache["v"], v, position, fill),
    }
    if m > 1:
        slots = cache["slots"]
        is_new = tf.equal(tf.range(slots.shape[1]), position)
        cache["slots"] = tf.where(is_new, _own_slots(slots.shape[0], slots.shape[1], m), slots)
    return cache


def _written(
    buffer: tf.Tensor, block: tf.Tensor, position: tf.Tensor, fill: Callable[..., tf.Tensor]
) -> tf.Tensor:
    b, heads, size, m, h = buffer.shape
    length = 1 if m > 1 else block.shape[1]
    block = tf.transpose(tf.reshape(block, [b, m * length, heads, h]), [0, 2, 1, 3])
    places = positions_of_block(position, length)  # [T] or [B, T]
    rows = tf.reshape(tf.range(b * heads) * size, [b, heads, 1])
    places = places if places.shape.rank == 1 else tf.expand_dims(places, 1)
    index = tf.reshape(rows + places, [-1, 1])
    flat = tf.reshape(buffer, [b * heads * size, m * h])
    block = tf.reshape(tf.cast(block, buffer.dtype), [b * heads * length, m * h])
    return tf.reshape(fill(flat, index, block), buffer.shape)


def read(cache: KeysAndValues, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns keys and values of all slots.

    Shapes:
      returns: [B, K, S * M, H] twice
    """
    b, heads, size, m, h = cache["k"].shape
    k, v = (tf.reshape(tf.cast(cache[n], dtype), [b, heads, size * m, h]) for n in ("k", "v"))
    return k, v


def own_mask(cache: KeysAndValues, mask: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the mask over all slots, so that each hypothesis attends only to its own past.

    Shapes:
      mask: bool, broadcastable to [B * M, N, 1, S]; any shape if M is 1
      returns: the mask itself if M is 1, else broadcastable to [B, N, M, S * M]
    """
    m, b, size = num_hypotheses(cache), cache["k"].shape[0], size_of(cache)
    if m == 1:
        return mask
    is_own = tf.equal(tf.expand_dims(cache["slots"], -1), tf.range(m))
    is_own = tf.reshape(is_own, [b, 1, m, size, m])
    if mask is not None:
        is_own &= tf.expand_dims(_by_row(mask, m), -1)
    return tf.reshape(is_own, [b, is_own.shape[1], m, size * m])


def own_bias(cache: KeysAndValues, bias: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the bias over all slots.

    Shapes:
      bias: float, broadcastable to [B * M, N, 1, S]; any shape if M is 1
      returns: the bias itself if M is 1, else broadcastable to [B, N, M, S * M]
    """
    m = num_hypotheses(cache)
    if m == 1 or bias is None:
        return bias
    bias = _by_row(bias, m)
    return bias if bias.shape[-1] == 1 else tf.repeat(bias, m, axis=-1)


def of_places(cache: KeysAndValues, weights: tf.Tensor) -> tf.Tensor:
    """Returns attention weights over positions, given attention weights over all slots.

    Shapes:
      weights: [B, T, S], or [B, M, S * M] if M > 1
      returns: [B, T, S], or [B * M, 1, S]
    """
    m, b, size = num_hypotheses(cache), cache["k"].shape[0], size_of(cache)
    if m == 1:
        return weights
    return tf.reshape(tf.reduce_sum(tf.reshape(weights, [b, m, size, m]), -1), [b * m, 1, size])


def expand(cache: KeysAndValues, k: int, *, dim: int = 0) -> KeysAndValues:
    """Repeats every hypothesis k times; `dim` is the dim of the rows."""
    b, m = cache["k"].shape[dim], cache["k"].shape[dim + 3]
    return choose(cache, tf.repeat(tf.range(b * m), k), dim=dim)


def choose(cache: KeysAndValues, rows: tf.Tensor, *, dim: int = 0) -> KeysAndValues:
    """Returns the cache of some hypotheses; each stays with its source.

    If the number of hypotheses does not change, no keys are moved.

    Shapes:
      rows: [B * M'] int32, in the order of sources; `dim` is the dim of the rows
    """
    lead, (b, heads, size, m, h) = cache["k"].shape[:dim], cache["k"].shape[dim:]
    chosen = rows.shape[0] // b
    if chosen == m:
        return cache if m == 1 else {**cache, "slots": tf.gather(cache["slots"], rows, axis=dim)}
    if m == 1:
        moved = {name: tf.repeat(cache[name], chosen, axis=dim + 3) for name in ("k", "v")}
    else:
        slots = tf.reshape(tf.gather(cache["slots"], rows, axis=dim), [-1, chosen, size])
        slots = tf.expand_dims(tf.transpose(slots, [0, 2, 1]), 1)  # [B, 1, S, M']
        slots = tf.repeat(slots, heads, axis=1)
        moved = {}
        for name in ("k", "v"):
            flat = tf.reshape(cache[name], [-1, heads, size, m, h])
            flat = tf.gather(flat, slots, batch_dims=3)
            moved[name] = tf.reshape(flat, [*lead, b, heads, size, chosen, h])
    slots = _own_slots(b * chosen, size, chosen)
    return {**moved, "slots": tf.broadcast_to(slots, [*lead, b * chosen, size])}


def _own_slots(num_rows: int, size: int, m: int) -> tf.Tensor:
    own = tf.expand_dims(tf.range(num_rows) % m, 1)
    return tf.broadcast_to(own, [num_rows, size])


def _by_row(x: tf.Tensor, m: int) -> tf.Tensor:
    """Moves hypotheses to their own dim: [1 or B * M, N, 1, S] -> [1 or B, N, 1 or M, S]."""
    x = tf.reshape(x, [1] * (4 - x.shape.rank) + x.shape.as_list())
    rows, heads, _, size = x.shape
    if rows == 1:
        return x
    return tf.transpose(tf.reshape(x, [rows // m, m, heads, size]), [0, 2, 1, 3])
