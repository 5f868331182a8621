"""Reads and writes one checkpoint: a directory with TensorFlow's tensor files and a JSON file.

    step_00000100/
      tensors.index, tensors.data-…   readable by tf.train.load_checkpoint("step_00000100/tensors")
      checkpoint.json                 written last; without it the checkpoint is incomplete

On a local file system, all files are written to a hidden directory, synced to the disk, and the
directory is renamed. A directory with the final name is therefore complete. On other file systems
(gs://, ram://), the JSON file marks the checkpoint as complete.

Every process of a run writes its own data files. Process 0 merges their indexes and writes the
JSON file when the files of all processes are on the disk.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files, out_of_memory
from tekso.framework.execution import shards
from tekso.framework.execution.shards import Slices
from tekso.framework.run import disk_space, tensor_files
from tekso.framework.run.checkpoint_check import check_files
from tekso.framework.run.checkpoint_description import Description, describe
from tekso.framework.run.checkpoint_errors import (
    CheckpointError,
    DamagedCheckpointError,
    DiskFullError,
    WriteError,
    first_line,
)
from tekso.framework.run.file_checksum import checksum
from tekso.framework.run.lease import DESCRIPTION, Lease
from tekso.framework.run.logdir import LogdirLostError
from tekso.framework.run.process_group import LostProcessError, ProcessGroup
from tekso.framework.run.software_versions import versions
from tekso.framework.run.tensor_files import Piece, TensorFiles

__all__ = [
    "DESCRIPTION", "UNFINISHED", "Checkpoint", "CheckpointError", "DamagedCheckpointError",
    "Description", "DiskFullError", "describe", "open_unread", "open_verified", "write",
    "write_parts", "write_shards",
]  # fmt: skip

PREFIX = "tensors"
UNFINISHED = ".unfinished_"
_EXCHANGE = "checkpoint"


class Checkpoint:
    """A checkpoint, open for reading. What is read is compared with the checksum of its piece.

    A run in progress does not delete it until `release` is called or no variable refers to it.
    """

    def __init__(self, path: str, description: Description, lease: Lease) -> None:
        self.path, self._lease = path, lease
        self.description = description
        self._files = TensorFiles(files.join(path, PREFIX))
        self.keys = frozenset(self._files.shapes)

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.description.step

    def release(self) -> None:
        """Permits a run in progress to delete the checkpoint."""
        self._lease.release()

    def read(self, key: str) -> np.ndarray:
        """Returns the whole array of a key.

        Raises:
          DamagedCheckpointError: its bytes have changed, or a file is missing.
        """
        return self._files.read(key)

    def read_slice(self, key: str, where: Slices) -> np.ndarray:
        """Returns a part of the array of a key; reads only the pieces that overlap it.

        Raises:
          DamagedCheckpointError: as in `read`.
        """
        return np.asarray(self._files.read_slice(key, where))

    def stored(
        self, key: str, *, damaged: Callable[[DamagedCheckpointError], None] | None = None
    ) -> StoredTensor:
        """Returns the tensor of a key, whose slices are read when it is indexed.

        Args:
          key: key of the tensor.
          damaged: called instead of raising DamagedCheckpointError; the slice is then zeros.
        """
        return StoredTensor(self._files, key, damaged)

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the array of a key without reading the array."""
        return tuple(self._files.shapes[key])

    def dtype(self, key: str) -> tf.DType:
        """Returns the data type of a key."""
        return self._files.dtypes[key]

    def size_bytes(self, key: str) -> int:
        """Returns the bytes of the array of a key."""
        return math.prod(self.shape(key)) * int(self.dtype(key).size)


class StoredTensor:
    """A tensor of a checkpoint; `tensor[slices]` reads a part of it."""

    def __init__(
        self,
        tensors: TensorFiles,
        key: str,
        damaged: Callable[[DamagedCheckpointError], None] | None,
    ) -> None:
        self._files, self._key, self._damaged = tensors, key, damaged
        self.shape = tuple(tensors.shapes[key])

    def __getitem__(self, where: Slices) -> tf.Tensor:
        """Returns the part at slices, one for every dim."""
        try:
            return self._files.read_slice(self._key, where)
        except DamagedCheckpointError as error:
            if self._damaged is None:
                raise
            self._damaged(error)
            return tf.zeros([s.stop - s.start for s in where], self._files.dtypes[self._key])


def write(path: str, tensors: Mapping[str, np.ndarray], description: Description) -> Description:
    """Writes a checkpoint of whole arrays; see `write_shards`."""
    size_bytes = sum(array.nbytes for array in tensors.values())
    return write_parts(path, [tensors], description, size_bytes=size_bytes)


def write_parts(
    path: str,
    parts: Iterable[Mapping[str, np.ndarray]],
    description: Description,
    *,
    size_bytes: int,
) -> Description:
    """Writes a checkpoint in parts, with one part in memory at a time; see `write_shards`.

    Args:
      path: as in `write_shards`.
      parts: arrays by key; the parts have no key in common.
      description: as in `write_shards`.
      size_bytes: total bytes of all arrays.
    """
    pieces = (list(map(tensor_files.on_host, shards.of_arrays(part))) for part in parts)
    return write_shards(path, pieces, description, size_bytes=size_bytes, group=ProcessGroup())


def write_shards(
    path: str,
    parts: Iterable[Sequence[Piece]],
    description: Description,
    *,
    size_bytes: int,
    group: ProcessGroup,
    check: Callable[[], None] = lambda: None,
) -> Description:
    """Writes a checkpoint atomically: it is complete at `path`, or there is nothing at `path`.

    All processes of the group must call it. It returns in process 0 when the checkpoint is
    complete, in the others when their files are written.

    Args:
      path: directory of the checkpoint. Its parent is created, but not the folders above that.
      parts: the pieces of this process; a part is one data file.
      description: the description without `created`, `versions` and `files`, which are filled in.
      size_bytes: total bytes of all pieces of this process.
      group: the processes that write.
      check: called in process 0 before the folder is made and before it is renamed. If it raises a
        LogdirLostError, nothing is removed, because the path may belong to another process.

    Raises:
      DiskFullError: there is not enough disk space; all files written so far are removed.
      WriteError: writing failed for another reason; all files written so far are removed, also
        if `parts` raises an error.
    """
    above, base = os.path.split(path)
    place = files.join(above, UNFINISHED + base) if files.is_local(path) else path
    prefix = files.join(place, f"{PREFIX}_part_{group.process}_")
    needed = sum(group.gather(size_bytes, exchange=_EXCHANGE))
    try:
        with _together(group):
            if group.is_first:
                check()
                disk_space.check_free(path, needed)
                files.remove_folder(place)
                for folder in (above, place):  # somebody may have removed all checkpoints
                    files.make_folder(folder, parents=False)
        written: dict[str, Any] = {}
        with _together(group):
            written = _write_own(prefix, parts)
        all_written = group.gather(written, exchange=_EXCHANGE)
        if not group.is_first:
            return description
        described = {key: about["shape"] for key, about in description.tensors.items()}
        _check_complete(all_written, described)
        ordered = {name: one for each in all_written for name, one in each["files"].items()}
        checksums = _merge(place, ordered)
        description = dataclasses.replace(
            description,
            versions=versions(),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            files=checksums,
        )
        about = files.join(place, DESCRIPTION)
        files.write_atomically(about, description.to_json(), parents=False)
        if place != path:
            files.sync(place)
            check()
            files.rename(place, path)
            files.sync(above)
    except (DiskFullError, LostProcessError, LogdirLostError):
        raise
    except (OSError, tf.errors.OpError) as error:
        check()
        _remove_quietly(place, group)
        if out_of_memory.shortage_of(error) is not None:
            raise
        if (full := disk_space.full_checkpoint(path, error)) is not None:
            raise full from error
        reason = first_line(error)
        raise WriteError(f"cannot write the checkpoint {path}: {reason}") from error
    except BaseException:  # an error while computing the tensors, or an interruption
        _remove_quietly(place, group)
        raise
    return description


@contextlib.contextmanager
def _together(group: ProcessGroup) -> Iterator[None]:
    """Runs a block in all processes; if it fails in one, it fails in all when all have ended it.

    Raises:
      CheckpointError: the block failed in another process.
    """
    failed: BaseException | None = None
    try:
        yield
    except Exception as error:
        failed = error
    reason_here = first_line(failed) if failed is not None else None
    reasons = group.gather(reason_here, exchange=_EXCHANGE)
    if failed is not None:
        raise failed
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(f"{group.name(process)} cannot write its shards: {reason}")


def _write_own(prefix: str, parts: Iterable[Sequence[Piece]]) -> dict[str, Any]:
    """Writes the data files of this process, and waits until they are on the disk.

    Returns: "files": {prefix of a part: size and checksum of its data file}; "elements": {key:
      [number of elements written, number of elements of the whole tensor]}.
    """
    elements: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    prefixes: list[str] = []
    for part in parts:
        prefixes.append(f"{prefix}{len(prefixes)}")
        tensor_files.write(prefixes[-1], part)
        for shard, _ in part:
            elements[shard.key][0] += shard.size
            elements[shard.key][1] = math.prod(shard.shape)
        del part  # frees its tensors before the next part is made
    checksums = {}
    for one in prefixes:
        name = tensor_files.data_file(one)
        files.sync(name)
        checksums[files.base_name(one)] = checksum(name)
    return {"files": checksums, "elements": elements}


def _check_complete(
    written: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises a CheckpointError unless the processes together wrote every tensor, once."""
    found: dict[str, int] = collections.defaultdict(int)
    wanted = {key: math.prod(shape) for key, shape in shapes.items()}
    for each in written:
        for key, (count, total) in each["elements"].items():
            found[key] += count
            wanted.setdefault(key, total)
    wrong = [key for key, count in wanted.items() if found[key] != count]
    if wrong:
        raise CheckpointError(
            f"the processes wrote {found[wrong[0]]:,} of {wanted[wrong[0]]:,} elements of "
            f"{wrong[0]} ({len(wrong)} such tensors). This is an error of Tekso: please report it. "
            "Earlier checkpoints are unchanged"
        )


def _merge(place: str, written: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the files of all processes; returns {name: size and checksum} of the final files."""
    for part, wanted in written.items():
        name = tensor_files.data_file(files.join(place, part))
        if not files.exists(name) or files.size_bytes(name) != wanted["size_bytes"]:
            raise CheckpointError(
                f"{name} was written by another process, but process 0 does not see it: all "
                "processes must write to the same folder. Give a --logdir that they share"
            )
    prefix = files.join(place, PREFIX)
    tensor_files.merge([files.join(place, part) for part in written], prefix)
    index = tensor_files.index_file(prefix)
    files.sync(index)
    checksums: dict[str, Any] = {files.base_name(index): checksum(index)}
    for number, about in enumerate(written.values()):
        checksums[tensor_files.data_file(PREFIX, number, len(written))] = dict(about)
    return checksums


def open_unread(path: str) -> Checkpoint:
    """Opens a checkpoint after verifying the index and the sizes of the data files.

    Reading a tensor verifies its bytes, and raises DamagedCheckpointError if they have changed.

    Raises:
      DamagedCheckpointError: a file is missing, truncated or changed; the text says which.
      DeletedCheckpointError: there is no such checkpoint, or it is being deleted.
    """
    return _open(path, verified=lambda name: not name.startswith(f"{PREFIX}.data-"))


def open_verified(path: str) -> Checkpoint:
    """Opens a checkpoint after verifying the checksums of all its files.

    Raises:
      DamagedCheckpointError: a file is missing, truncated or changed; the text says which.
      DeletedCheckpointError: there is no such checkpoint, or it is being deleted.
    """
    return _open(path, verified=lambda name: True)


def _open(path: str, *, verified: Callable[[str], bool]) -> Checkpoint:
    lease = Lease(path)
    description = describe(path)
    check_files(path, description, verified=verified)
    checkpoint = Checkpoint(path, description, lease)
    if description.tensors and (other := checkpoint.keys ^ description.tensors.keys()):
        raise DamagedCheckpointError(
            f"{DESCRIPTION} and the files have different tensors: {sorted(other)[:3]}"
        )
    return checkpoint


def _remove_quietly(path: str, group: ProcessGroup) -> None:
    if group.is_first:
        with contextlib.suppress(OSError):  # the first error is the one to report
            files.remove_folder(path)
