"""Shuffling by index: the position of each element is computed, so no permutation is stored.

A permutation of `size` numbers is a Feistel network on the smallest rectangle a × b with at least
`size` cells. Each round adds a hash of one coordinate to the other, which is invertible, so the
network is a permutation of the rectangle. A result outside of the first `size` cells is permuted
again (cycle walking).

    x = left * b + right      left  ← (left  + hash(right)) mod a
                              right ← (right + hash(left))  mod b      and so on

The state of a shuffle is a seed and a position. (`tf.random.experimental.index_shuffle` does the
same as a TensorFlow op with one seed per call. This is NumPy code with one seed per element, so
that a batch can cross the end of an epoch.)

Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains", generalised Feistel and
cycle walking; the hash is the finaliser of SplitMix64 (Steele et al. 2014).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ROUNDS = 4  # each round changes both coordinates

Words = npt.NDArray[np.uint64]


def mix(x: Words) -> Words:
    """Mixes every uint64 element: a bijection whose output bits depend on all input bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold(key: Words, value: npt.ArrayLike) -> Words:
    """Returns the keys of sub-streams; `value` has integers, and is broadcast against `key`."""
    words = np.atleast_1d(np.asarray(value)).astype(np.int64).view(np.uint64)
    return mix(mix(key) + words * np.uint64(_GOLDEN))


def key_of(seed: int, name: str) -> Words:
    """Returns the key of a named stream, [1] uint64; the seed may be any integer."""
    first = np.array([seed & _MASK], np.uint64)
    rest = np.array([(seed >> 64) & _MASK], np.uint64)  # also the sign
    return fold(mix(first + np.uint64(_GOLDEN)) ^ mix(rest), zlib.crc32(name.encode()))


def permute(index: npt.ArrayLike, size: int, key: Words) -> npt.NDArray[np.int64]:
    """Returns the images of elements under a permutation of 0, …, size - 1.

    Args:
      index: the elements.
      size: number of elements of the permutation.
      key: key of the permutation; [1] for all elements, or one per element.

    Shapes:
      index: [n], each in [0, size)
      key: [1] or [n], uint64
      returns: [n] int64

    Raises:
      IndexError: an index is out of range.
    """
    return _permuted(index, size, key, _walk)


def permute_back(index: npt.ArrayLike, size: int, key: Words) -> npt.NDArray[np.int64]:
    """Returns the elements whose images under `permute` are given: its inverse.

    Args:
      index: the images.
      size: number of elements of the permutation.
      key: key of the permutation; [1] for all elements, or one per element.

    Shapes:
      index: [n], each in [0, size)
      key: [1] or [n], uint64
      returns: [n] int64

    Raises:
      IndexError: an index is out of range.
    """
    return _permuted(index, size, key, _walk_back)


def _permuted(
    index: npt.ArrayLike, size: int, key: Words, walk: Callable[[Words, Any, Any, Words], Words]
) -> npt.NDArray[np.int64]:
    x = np.atleast_1d(np.asarray(index)).astype(np.int64)
    if size < 1 or (len(x) and (x.min() < 0 or x.max() >= size)):
        raise IndexError(f"a permutation of {size} elements has no index {x.tolist()[:5]}")
    height = math.isqrt(size - 1) + 1
    width = -(-size // height)
    a, b = np.uint64(height), np.uint64(width)
    rounds = mix(key + np.uint64(_GOLDEN) * np.arange(1, 2 * _ROUNDS + 1, dtype=np.uint64)[:, None])
    words = walk(x.view(np.uint64), a, b, rounds)
    outside = np.flatnonzero(words >= size)
    while len(outside):
        keys = rounds if rounds.shape[1] == 1 else rounds[:, outside]
        words[outside] = walk(words[outside], a, b, keys)
        outside = outside[words[outside] >= size]
    return words.view(np.int64)


def _walk(x: Words, a: np.uint64, b: np.uint64, rounds: Words) -> Words:
    """Returns the images under the Feistel network on the rectangle a × b."""
    left, right = np.divmod(x, b)
    for i in range(0, 2 * _ROUNDS, 2):
        left = (left + mix(right ^ rounds[i]) % a) % a
        right = (right + mix(left ^ rounds[i + 1]) % b) % b
    return left * b + right


def _walk_back(x: Words, a: np.uint64, b: np.uint64, rounds: Words) -> Words:
    """Returns the elements whose images under `_walk` are given."""
    left, right = np.divmod(x, b)
    for i in reversed(range(0, 2 * _ROUNDS, 2)):
        right = (right + (b - mix(left ^ rounds[i + 1]) % b)) % b
        left = (left + (a - mix(right ^ rounds[i]) % a)) % a
    return left * b + right
