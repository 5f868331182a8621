"""Reads and writes one checkpoint: a directory with TensorFlow's tensor files and a JSON file.

    step_00000100/
      tensors.index, tensors.data-…   readable by tf.train.load_checkpoint("step_00000100/tensors")
      checkpoint.json                 written last; without it the checkpoint is incomplete

On a local file system, all files are written to a hidden directory, synced to the disk, and the
directory is renamed. A directory with the final name is therefore complete. On other file systems
(gs://, ram://), the JSON file marks the checkpoint as complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files

FORMAT = 1
PREFIX = "tensors"
DESCRIPTION = "checkpoint.json"
UNFINISHED = ".unfinished_"
_CHUNK_BYTES = 1 << 22
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(Exception):
    """A checkpoint could not be written, found or read; the text says what to do."""


class DiskFullError(CheckpointError):
    """There is not enough disk space for a checkpoint."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or its bytes have changed."""


@dataclasses.dataclass(frozen=True)
class Description:
    """The content of checkpoint.json.

    Attributes:
      step: training steps done.
      model: key of the experiment.
      params: text of the whole Params tree.
      task: text of the Params of the task, completed with the sizes from the data; "" if an earlier
        version wrote the checkpoint.
      metrics: figures of the evaluations at this step, {"evaluation/metric": value}.
      input: seed and position of the training input.
      tensors: {key: {"shape", "dims", "dtype"}} of every tensor in the file.
      versions: versions of the software that wrote the checkpoint.
      created: time of writing, UTC.
      files: {name: {"size_bytes", "sha256"}} of the tensor files.
      averaged: the checkpoints of which this one is the average; empty for a checkpoint of a
        training run.
    """

    step: int
    model: str
    params: str
    task: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    input: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    created: str = ""
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    averaged: Sequence[str] = ()

    def at(self, step: int, metrics: Mapping[str, float]) -> Description:
        """Returns the description of a checkpoint of the same run at a step.

        Args:
          step: training steps done.
          metrics: {"evaluation/metric": value} of the evaluations at this step.
        """
        position = {**self.input, "position": step}
        return dataclasses.replace(self, step=step, metrics=metrics, input=position)

    def to_json(self) -> str:
        """Returns the text of the JSON file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Description:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: the text is not a description, or has a later format.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"not the description of a checkpoint of format {FORMAT}")
        known = {field.name for field in dataclasses.fields(Description)}
        if missing := {"step", "model", "params", "files"} - fields.keys():
            raise ValueError(f"the description lacks {', '.join(sorted(missing))}")
        return Description(**{name: value for name, value in fields.items() if name in known})


class Checkpoint:
    """A checkpoint, open for reading."""

    def __init__(self, path: str, description: Description) -> None:
        self.path = path
        self.description = description
        try:
            self._reader = tf.compat.v1.train.NewCheckpointReader(files.join(path, PREFIX))
        except (ValueError, tf.errors.OpError) as error:
            reason = f"TensorFlow cannot read it: {_first_line(error)}"
            raise DamagedCheckpointError(reason) from error
        self._shapes = self._reader.get_variable_to_shape_map()
        self._dtypes = self._reader.get_variable_to_dtype_map()
        self.keys = frozenset(self._shapes)

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.description.step

    def read(self, key: str) -> np.ndarray:
        """Returns the whole array of a key."""
        return np.asarray(self._reader.get_tensor(key))

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the array of a key without reading the array."""
        return tuple(self._shapes[key])

    def dtype(self, key: str) -> tf.DType:
        """Returns the data type of a key."""
        return self._dtypes[key]

    def size_bytes(self, key: str) -> int:
        """Returns the bytes of the array of a key."""
        return math.prod(self.shape(key)) * int(self.dtype(key).size)


def versions() -> dict[str, str]:
    """Returns the versions of Tekso, Python, TensorFlow and NumPy in this process."""
    try:
        ours = importlib.metadata.version("tekso")
    except importlib.metadata.PackageNotFoundError:  # a checkout
        ours = "not installed"
    return {
        "tekso": ours,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
    }


def write(path: str, tensors: Mapping[str, np.ndarray], description: Description) -> Description:
    """Writes a checkpoint atomically: it is complete at `path`, or there is nothing at `path`.

    Args:
      path: directory of the checkpoint; its parent must exist.
      tensors: the arrays by key.
      description: the description without `created`, `versions` and `files`, which are filled in.

    Raises:
      DiskFullError: there is not enough disk space; all files written so far are removed.
      CheckpointError: writing failed for another reason; all files written so far are removed.
    """
    size_bytes = sum(array.nbytes for array in tensors.values())
    return _write(path, lambda prefix: _write_tensors(prefix, tensors), description, size_bytes)


def write_parts(
    path: str,
    parts: Iterable[Mapping[str, np.ndarray]],
    description: Description,
    *,
    size_bytes: int,
) -> Description:
    """Writes a checkpoint in parts, with one part in memory at a time.

    Args:
      path: as in `write`.
      parts: arrays by key; the parts have no key in common.
      description: as in `write`.
      size_bytes: total bytes of all arrays.

    Raises:
      CheckpointError: as in `write`; files are also removed if `parts` raises an error.
    """

    def save(prefix: str) -> None:
        saved: list[str] = []
        for tensors in parts:
            saved.append(f"{prefix}_part_{len(saved)}")
            _write_tensors(saved[-1], tensors)
        with tf.device("/cpu:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=saved, destination_prefix=prefix, delete_old_dirs=False
            )

    return _write(path, save, description, size_bytes)


def _write(
    path: str, save: Callable[[str], None], description: Description, needed: int
) -> Description:
    above, base = os.path.split(path)
    place = files.join(above, UNFINISHED + base) if files.is_local(path) else path
    try:
        _refuse_if_full(path, needed)
        files.remove_folder(place)
        files.make_folder(place)
        save(files.join(place, PREFIX))
        checksums = {}
        for name in files.names(place):
            files.sync(files.join(place, name))
            checksums[name] = _checksum(files.join(place, name))
        description = dataclasses.replace(
            description,
            versions=versions(),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            files=checksums,
        )
        files.write_atomically(files.join(place, DESCRIPTION), description.to_json())
        if place != path:
            files.sync(place)
            files.rename(place, path)
            files.sync(above)
    except DiskFullError:
        raise
    except (OSError, tf.errors.OpError) as error:
        free = _free_bytes(above)  # before the files written so far are removed
        _remove_quietly(place)
        if _means_disk_full(error):
            raise DiskFullError(_disk_full_text(path, needed, free, error)) from error
        reason = _first_line(error)
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}") from error
    except BaseException:  # an error while computing the tensors, or an interruption
        _remove_quietly(place)
        raise
    return description


def describe(path: str) -> Description:
    """Reads only the description of a checkpoint.

    Raises:
      DamagedCheckpointError: there is no description, or it cannot be read.
    """
    try:
        return Description.from_json(files.read(files.join(path, DESCRIPTION)).decode("utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"it has no {DESCRIPTION}: writing it was interrupted"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise DamagedCheckpointError(f"{DESCRIPTION} is damaged: {_first_line(error)}") from error


def open_verified(path: str) -> Checkpoint:
    """Opens a checkpoint after verifying the checksums of all its files.

    Raises:
      DamagedCheckpointError: a file is missing, truncated or changed; the text says which.
    """
    description = describe(path)
    if not description.files:
        raise DamagedCheckpointError(f"{DESCRIPTION} names no files")
    for name, wanted in description.files.items():
        try:
            found = _checksum(files.join(path, name))
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {error.strerror}") from error
        if found["size_bytes"] != wanted.get("size_bytes"):
            raise DamagedCheckpointError(
                f"{name} has {found['size_bytes']:,} bytes, but "
                f"{wanted.get('size_bytes', 0):,} were written"
            )
        if found != wanted:
            raise DamagedCheckpointError(f"the bytes of {name} have changed (sha256 differs)")
    checkpoint = Checkpoint(path, description)
    if description.tensors and (other := checkpoint.keys ^ description.tensors.keys()):
        raise DamagedCheckpointError(
            f"{DESCRIPTION} and the files have different tensors: {sorted(other)[:3]}"
        )
    return checkpoint


def _write_tensors(prefix: str, tensors: Mapping[str, np.ndarray]) -> None:
    with tf.device("/cpu:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=[tf.convert_to_tensor(array) for array in tensors.values()],
        )


def _checksum(path: str) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with files.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"size_bytes": size, "sha256": digest.hexdigest()}


def _refuse_if_full(path: str, needed: int) -> None:
    free = _free_bytes(os.path.dirname(path))
    if free is not None and free < needed:
        raise DiskFullError(_disk_full_text(path, needed, free, None))


def _free_bytes(directory: str) -> int | None:
    try:
        return shutil.disk_usage(directory).free if files.is_local(directory) else None
    except OSError:
        return None


def _means_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    return any(os.strerror(code) in str(error) for code in _DISK_FULL)


def _disk_full_text(path: str, needed: int, free: int | None, error: Exception | None) -> str:
    cause = f" ({_first_line(error)})" if error is not None else ""
    have = f"{free:,} are free" if free is not None else "the file system is full"
    return (
        f"not enough disk space for the checkpoint {path}: it needs {needed:,} bytes, {have}"
        f"{cause}. Earlier checkpoints are unchanged, and the files of this one were removed. Free "
        "disk space and repeat the command; run.keep_last_checkpoints sets how many checkpoints "
        "are kept"
    )


def _remove_quietly(path: str) -> None:
    with contextlib.suppress(OSError):  # the first error is the one to report
        files.remove_folder(path)


def _first_line(error: Exception) -> str:
    text = str(getattr(error, "message", "") or error)
    return text.splitlines()[0] if text else type(error).__name__
