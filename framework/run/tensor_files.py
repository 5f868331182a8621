"""Tensor files of a checkpoint, in TensorFlow's format (tensor bundle).

    tensors.index                 names, shapes and slices, with the CRC-32C of every piece
    tensors.data-00000-of-00003   bytes of pieces

Every process writes data files of its own, and one process then merges their indexes. A tensor may
be in several pieces, in any data files. Reading a slice of a tensor reads the pieces that overlap
it, one at a time, and compares their CRC-32C.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files, out_of_memory
from tekso.framework.execution.shards import Shard, Slices, is_sliceable, whole
from tekso.framework.run import index_check
from tekso.framework.run.checkpoint_errors import (
    DamagedCheckpointError,
    DeletedCheckpointError,
    first_line,
)

_DATA_FILE = "{}.data-{:05d}-of-{:05d}"
_HOST = "/cpu:0"
_CHANGED = re.compile(r"shard (\d+) \(\d+ bytes\): Checksum does not match")

Piece = tuple[Shard, Any]
"""A shard and its value."""


def on_host(shard: Shard) -> Piece:
    """Returns a shard with its value; copies the value only if it is on another device."""
    with tf.device(_HOST):
        return shard, tf.identity(tf.convert_to_tensor(shard.read()))


def write(prefix: str, part: Sequence[Piece]) -> None:
    """Writes pieces to one data file with its index: `prefix` is the path without suffix."""
    with tf.device(_HOST):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[shard.key for shard, _ in part],
            shape_and_slices=[_slice_text(shard.shape, shard.where) for shard, _ in part],
            tensors=[value for _, value in part],
        )


def data_file(prefix: str, number: int = 0, count: int = 1) -> str:
    """Returns the name of a data file; the files of `write` are number 0 of 1."""
    return _DATA_FILE.format(prefix, number, count)


def index_file(prefix: str) -> str:
    """Returns the name of the index."""
    return f"{prefix}.index"


def merge(prefixes: Sequence[str], prefix: str) -> None:
    """Merges the indexes of parts; the data file of part i becomes number i."""
    with tf.device(_HOST):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=list(prefixes), destination_prefix=prefix, delete_old_dirs=False
        )


class TensorFiles:
    """Tensor files, open for reading.

    Raises:
      DamagedCheckpointError: TensorFlow cannot read the index.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        try:
            if files.exists(index_file(prefix)):
                index_check.check_index(index_file(prefix))
            self._reader = tf.compat.v1.train.NewCheckpointReader(prefix)
            self.shapes: dict[str, Sequence[int]] = self._reader.get_variable_to_shape_map()
            self.dtypes: dict[str, tf.DType] = self._reader.get_variable_to_dtype_map()
            index_check.check_tensors(prefix, self.shapes, self.dtypes)
        except (ValueError, OSError, tf.errors.OpError) as error:
            if out_of_memory.shortage_of(error) is not None:
                raise
            reason = f"TensorFlow cannot read it: {first_line(error)}"
            raise DamagedCheckpointError(reason) from error

    def read(self, key: str) -> np.ndarray:
        """Returns a whole tensor.

        Raises:
          DamagedCheckpointError: its bytes have changed, or a data file cannot be read.
          DeletedCheckpointError: the folder was deleted; see `lease.py`.
        """
        return np.asarray(self._read(key, lambda: self._reader.get_tensor(key)))

    def read_slice(self, key: str, where: Slices) -> tf.Tensor:
        """Returns a part of a tensor; reads only the pieces that overlap it.

        A variable that is assigned the result takes over its memory. An array would be copied.

        Raises:
          DamagedCheckpointError: as in `read`.
        """
        shape, dtype = self.shapes[key], self.dtypes[key]
        if where != whole(shape) and not is_sliceable(dtype.name):
            return self.read_slice(key, whole(shape))[where]

        def restore() -> tf.Tensor:
            with tf.device(_HOST):
                (value,) = tf.raw_ops.RestoreV2(
                    prefix=self._prefix,
                    tensor_names=[key],
                    shape_and_slices=[_slice_text(shape, where)],
                    dtypes=[dtype],
                )
            return value

        return self._read(key, restore)

    def _read(self, key: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            if out_of_memory.shortage_of(error) is not None:
                raise
            folder, name = os.path.split(self._prefix)
            if not files.exists(folder):
                raise DeletedCheckpointError(folder) from error
            reason = first_line(error).partition(" [Op:")[0]
            if found := _CHANGED.search(reason):
                count = sum(".data-" in other for other in files.names(folder))
                reason = f"the bytes of {data_file(name, int(found[1]), count)} have changed"
            raise DamagedCheckpointError(f"{key} cannot be read: {reason}") from error


def _slice_text(shape: Sequence[int], where: Slices) -> str:
    """Returns shape and slices for TensorFlow's ops: "6 5 0,2:-"; "" for a whole tensor."""
    if where == whole(shape):
        return ""
    slices = [
        "-" if (s.start, s.stop) == (0, size) else f"{s.start},{s.stop - s.start}"
        for s, size in zip(where, shape, strict=True)
    ]
    return f"{' '.join(map(str, shape))} {':'.join(slices)}"
