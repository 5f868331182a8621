"""Shards: the chunks of a program's state that one process stores in a checkpoint.

    weights/embedding  [32000, 2048]     process 0   rows 0 to 16000, in chunks of 32 MB
                                         process 1   rows 16000 to 32000
    weights/norm/scale [2048]            process 0   replicated, and stored once

A chunk is read only when it is written, so saving needs memory for a few chunks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

CHUNK_BYTES = 1 << 25

# TensorFlow's reader of checkpoints joins slices of these types only. Tensors of other types are
# stored whole.
_SLICEABLE = frozenset(
    ("float32", "float64", "bfloat16", "complex64", "bool", "int8", "int16", "int32", "int64")
) | {"uint8"}

Slices = tuple[slice, ...]
"""A slice with start and stop for every dim."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A chunk of a tensor of the state.

    Attributes:
      key: key of the tensor in a checkpoint.
      shape: shape of the whole tensor.
      dtype: name of the type.
      where: position of the chunk in the tensor.
      read: returns the current value of the chunk, a tensor or an array.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    where: Slices
    read: Callable[[], Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(s.stop - s.start for s in self.where)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.size * int(tf.as_dtype(self.dtype).size)

    @property
    def is_whole(self) -> bool:
        """Whether the chunk is the whole tensor."""
        return self.where == whole(self.shape)


class Owners:
    """Divides the chunks that several processes have among these processes, by bytes.

    All processes call it with the same chunks in the same order.

    Args:
      process: index of this process.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._bytes_of: collections.Counter[int] = collections.Counter()

    def is_own(self, shard: Shard, processes: Sequence[int]) -> bool:
        """Returns whether this process stores a chunk, given the processes that have it."""
        owner = min(processes, key=self._bytes_of.__getitem__)
        self._bytes_of[owner] += shard.size_bytes
        return owner == self._process


def whole(shape: Sequence[int]) -> Slices:
    """Returns the slices of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def cut_out(value: Any, where: Slices, of: Slices) -> Any:
    """Returns a part of a tensor or array.

    Args:
      value: a chunk of a tensor.
      where: position of the part in the tensor.
      of: position of the chunk in the tensor.
    """
    if where == of:
        return value
    pairs = zip(where, of, strict=True)
    return value[tuple(slice(w.start - o.start, w.stop - o.start) for w, o in pairs)]


def is_sliceable(dtype: str) -> bool:
    """Whether a tensor of a type can be stored in several chunks."""
    return dtype in _SLICEABLE


def chunks(
    key: str,
    shape: Sequence[int],
    dtype: str,
    read: Callable[[Slices], Any],
    where: Slices | None = None,
) -> Iterator[Shard]:
    """Yields a tensor in chunks of at most CHUNK_BYTES, if it can be sliced.

    Args:
      key: key of the tensor.
      shape: shape of the whole tensor.
      dtype: name of its type.
      read: returns the value at some slices of the tensor.
      where: position of the shard to cut; None: the whole tensor.
    """
    where = whole(shape) if where is None else where
    cut = [where]
    if is_sliceable(dtype):
        cut = list(_cut(where, max(1, CHUNK_BYTES // int(tf.as_dtype(dtype).size))))
    for one in cut:
        yield Shard(key, tuple(shape), dtype, one, functools.partial(read, one))


def _cut(where: Slices, most: int) -> Iterator[Slices]:
    """Cuts along the first dims, into chunks with at most `most` elements."""
    sizes = [s.stop - s.start for s in where]
    total = math.prod(sizes)
    if total <= most:
        yield where
        return
    dim = next(d for d, size in enumerate(sizes) if size > 1)
    step = max(1, most * sizes[dim] // total)
    for start in range(where[dim].start, where[dim].stop, step):
        stop = min(start + step, where[dim].stop)
        yield from _cut((*where[:dim], slice(start, stop), *where[dim + 1 :]), most)


def of_arrays(state: Mapping[str, np.ndarray]) -> Iterator[Shard]:
    """Yields the chunks of a state of arrays in this process."""
    for key, array in state.items():
        of = whole(array.shape)
        read = functools.partial(_read_array, np.asarray(array), of)
        yield from chunks(key, array.shape, tf.as_dtype(array.dtype).name, read)


def _read_array(array: np.ndarray, of: Slices, where: Slices) -> Any:
    return cut_out(array, where, of)
