"""Random numbers as a pure function of (key, example, element): a counter hash of integer ops.

A number depends only on the run's seed, the step, the stream (a layer's path and the indices of the
loops around it), and the global position of the element: its example and its place in the example.
A dropout mask is therefore the same for any number of devices and micro-batches, in any layout, and
when it is recomputed in the backward pass.

    key      = mix(seed, step, stream)                              one per layer and step
    row key  = finalise(key + example * GOLDEN)                     one per example
    bits     = finalise(position * GOLDEN ^ row key)                one per element

Source: the finaliser is the one of MurmurHash3 (Appleby 2011): 2 multiplications, 3 xor-shifts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.user_mistakes import MistakeError

_GOLDEN = 0x9E3779B1
_MASK = 0xFFFFFFFF


class RandomShapeError(MistakeError):
    """A shape of random numbers is a tensor."""


def _word(value: int) -> tf.Tensor:
    return tf.constant(value & _MASK, tf.uint32)


def _xor_shift(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _word(bits)))


def finalise(x: tf.Tensor) -> tf.Tensor:
    """Mixes every uint32 element: a bijection whose output bits depend on all input bits."""
    x = _xor_shift(x, 16) * _word(0x85EBCA6B)
    x = _xor_shift(x, 13) * _word(0xC2B2AE35)
    return _xor_shift(x, 16)


def fold(key: tf.Tensor, value: Any) -> tf.Tensor:
    """Returns the key of a sub-stream: `value` is an int or an integer scalar tensor."""
    if isinstance(value, int):
        for word in _words(value):
            key = finalise(tf.bitwise.bitwise_xor(key * _word(_GOLDEN), _word(word)))
        return key
    value = tf.cast(value, tf.int64)
    low = tf.cast(tf.bitwise.bitwise_and(value, tf.constant(0xFFFFFFFF, tf.int64)), tf.uint32)
    high = tf.cast(
        tf.bitwise.bitwise_and(
            tf.bitwise.right_shift(value, tf.constant(32, tf.int64)),
            tf.constant(0xFFFFFFFF, tf.int64),
        ),
        tf.uint32,
    )
    for word in (low, high):
        key = finalise(tf.bitwise.bitwise_xor(key * _word(_GOLDEN), word))
    return key


def root_key(seed: int, step: tf.Tensor | int) -> tf.Tensor:
    """Returns the key of a step.

    Args:
      seed: seed of the run, in [0, 2**64).
      step: an int or int64 scalar.
    """
    key = 0x7E450
    for word in _words(seed):
        key = _finalise_int(_MASK & key * _GOLDEN ^ word)
    return fold(_word(key), step)


def _words(value: int) -> tuple[int, int]:
    return value & _MASK, (value >> 32) & _MASK


def _finalise_int(x: int) -> int:
    """Returns what `finalise` does to one number, without ops."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return x ^ x >> 16


def stream(name: str) -> int:
    """Returns the number of a named stream, the same in every process."""
    return zlib.crc32(name.encode())


def bits(key: tf.Tensor, shape: Sequence[int], example_offset: tf.Tensor | int = 0) -> tf.Tensor:
    """Returns random uint32 bits.

    Args:
      key: key of the stream.
      shape: shape of the result; dim 0 is the batch dimension.
      example_offset: position of the first example in the global batch.

    Shapes:
      key: []
      returns: shape, uint32
    Raises:
      RandomShapeError: the shape is a tensor.
    """
    if tf.is_tensor(shape):
        raise RandomShapeError(
            "the shape of random numbers is a tensor, but must be numbers: write y.shape instead "
            "of tf.shape(y)"
        )
    if not shape:
        return finalise(key)
    example = tf.cast(tf.range(shape[0]), tf.uint32) + tf.cast(example_offset, tf.uint32)
    row = finalise(key + example * _word(_GOLDEN))
    inner = list(shape[1:])
    position = tf.reshape(tf.cast(tf.range(math.prod(inner)), tf.uint32), [1, *inner])
    row = tf.reshape(row, [shape[0]] + [1] * len(inner))
    return finalise(tf.bitwise.bitwise_xor(position * _word(_GOLDEN), row))


def uniform(key: tf.Tensor, shape: Sequence[int], example_offset: tf.Tensor | int = 0) -> tf.Tensor:
    """Returns random float32 numbers in [0, 1), multiples of 2**-24; arguments as for `bits`."""
    return _top_24_bits(bits(key, shape, example_offset)) * 2.0**-24


def normal(key: tf.Tensor, shape: Sequence[int], example_offset: tf.Tensor | int = 0) -> tf.Tensor:
    """Returns normal float32 numbers between -5.3 and 5.3; arguments as for `bits`.

    They are quantiles at odd multiples of 2**-24: symmetric, and exact in float32 without 0 and 1.
    """
    odd = tf.bitwise.bitwise_or(bits(key, shape, example_offset), _word(1 << 8))
    return tf.math.ndtri(_top_24_bits(odd) * 2.0**-24)


def keep_mask(
    key: tf.Tensor, rate: float, shape: Sequence[int], example_offset: tf.Tensor | int = 0
) -> tf.Tensor:
    """Returns a float32 mask: 0 with probability `rate`, otherwise 1 / (1 - rate)."""
    threshold = tf.constant(round(rate * 2**24), tf.float32)
    top = _top_24_bits(bits(key, shape, example_offset))
    return tf.where(top >= threshold, tf.constant(1.0 / (1.0 - rate), tf.float32), 0.0)


def _top_24_bits(x: tf.Tensor) -> tf.Tensor:
    # Cast by way of int32: some devices cannot compare unsigned integers. 24 bits are exact in
    # float32.
    return tf.cast(tf.cast(tf.bitwise.right_shift(x, _word(8)), tf.int32), tf.float32)
