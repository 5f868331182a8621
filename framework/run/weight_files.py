"""Reads and writes weights in safetensors files: one file, or a folder with the shards of one.

    write_weights("bytes.safetensors", {"model/embedding/table": table}, {"format": "np"})
    weights = open_weights("bytes.safetensors")
    weights.keys, weights.read("weights/model/embedding/table")

An open file has the attributes of a Checkpoint that readers of weights use. The names of its
tensors are weight paths, so the keys are "weights/<name>".
Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tekso.framework import bounded, files
from tekso.framework.execution.shards import Slices
from tekso.framework.run import checkpoint_files, disk_space
from tekso.framework.run.checkpoint_files import CheckpointError, Description
from tekso.framework.state import WEIGHTS

SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
# Names in the metadata of files that Tekso wrote.
_DESCRIPTION = "tekso.description"
_SHA256 = "tekso.sha256"  # of the names and bytes of all tensors of a file


class StoredWeights(Protocol):
    """Weights on disk: a Checkpoint or a WeightFile."""

    path: str

    @property
    def step(self) -> int:
        """Training steps done."""
        ...

    @property
    def description(self) -> Description | None:
        """Description of the checkpoint; None: another program wrote the weights."""
        ...

    @property
    def keys(self) -> Set[str]:
        """Keys of all tensors."""
        ...

    def read(self, key: str) -> np.ndarray:
        """Returns the whole array of a key."""
        ...

    def read_slice(self, key: str, where: Slices) -> np.ndarray:
        """Returns a part of the array of a key; reads little more than this part."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the array of a key."""
        ...


class WeightFile:
    """A safetensors file, or the shards of a folder, open for reading.

    Attributes:
      path: of the file or folder.
      metadata: texts by name, from the headers of all shards.
      keys: the keys of all tensors: "weights/<name>".
    """

    def __init__(self, path: str, shards: Sequence[str]) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self._shards: dict[str, Any] = {}  # by name of the tensor
        paths: dict[str, str] = {}
        for shard in shards:
            opened = _open(shard)
            names = list(opened.keys())
            for name in names:
                if name in self._shards:
                    raise CheckpointError(f"{paths[name]} and {shard} both have a tensor {name}")
                self._shards[name], paths[name] = opened, shard
            metadata = opened.metadata() or {}
            self._check_checksum(shard, names, metadata.get(_SHA256))
            self.metadata.update(metadata)
        self.keys = frozenset(WEIGHTS + name for name in self._shards)

    @property
    def step(self) -> int:
        """Training steps done, if Tekso wrote the file; otherwise 0."""
        return 0 if self.description is None else self.description.step

    @functools.cached_property
    def description(self) -> Description | None:
        """The description of the checkpoint that a file was exported from; None: by others.

        Raises:
          CheckpointError: it cannot be read.
        """
        text = self.metadata.get(_DESCRIPTION)
        try:
            return None if text is None else Description.from_json(text)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"the metadata of {self.path} are damaged: {error}") from error

    def read(self, key: str) -> np.ndarray:
        """Returns the whole array of a key.

        Raises:
          CheckpointError: it has a data type that NumPy does not have.
        """
        return self._read(key, lambda name: self._shards[name].get_tensor(name))

    def read_slice(self, key: str, where: Slices) -> np.ndarray:
        """Returns a part of the array of a key; raises as `read`."""
        if not where:
            return self.read(key)
        return self._read(key, lambda name: self._shards[name].get_slice(name)[where])

    def _read(self, key: str, read: Callable[[str], Any]) -> np.ndarray:
        name = key.removeprefix(WEIGHTS)
        try:
            return np.asarray(read(name))
        except (SafetensorError, AttributeError, TypeError) as error:
            dtype = self._shards[name].get_slice(name).get_dtype()
            raise CheckpointError(
                f"{name} of {self.path} cannot be read as {dtype}: {error}. Convert it to F32, F16 "
                "or BF16"
            ) from error

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the array of a key without reading the array."""
        name = key.removeprefix(WEIGHTS)
        return tuple(self._shards[name].get_slice(name).get_shape())

    def _check_checksum(self, shard: str, names: Sequence[str], wanted: str | None) -> None:
        if wanted is not None and wanted != _checksum(names, self.read):
            raise CheckpointError(
                f"{shard} is damaged: the bytes of its tensors have changed (sha256 differs)"
            )


def is_weight_file(path: str) -> bool:
    """Whether a path is a safetensors file, or a folder of such files that is no run."""
    path = os.path.expanduser(path)
    if path.endswith(SUFFIX):
        return True
    known = (checkpoint_files.DESCRIPTION, "checkpoints")
    if not files.is_folder(path) or any(files.exists(files.join(path, name)) for name in known):
        return False
    return any(name.endswith(SUFFIX) for name in files.names(path))


def open_weights(path: str) -> WeightFile:
    """Opens a safetensors file, or all shards of a folder.

    Raises:
      CheckpointError: a file is missing, damaged or not local, or two shards have one tensor.
    """
    path = os.path.expanduser(path).rstrip("/")
    if not files.is_local(path):
        raise CheckpointError(f"{path}: copy it to a local disk; safetensors are read from there")
    if not os.path.isdir(path):
        return WeightFile(path, [path])
    names = files.names(path)
    for index in (name for name in names if name.endswith(_INDEX)):
        _check_index(files.join(path, index), names)
    shards = [files.join(path, name) for name in names if name.endswith(SUFFIX)]
    if not shards:
        raise CheckpointError(f"the folder {path} has no file *{SUFFIX}")
    return WeightFile(path, shards)


def write_weights(
    path: str,
    weights: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    *,
    description: Description | None = None,
) -> None:
    """Writes a safetensors file atomically, with a checksum of the tensors in its metadata.

    Args:
      path: path of the file.
      weights: {name: array}.
      metadata: texts by name.
      description: of the checkpoint that the weights are from.

    Raises:
      CheckpointError: the file cannot be written.
    """
    arrays = {name: np.require(array, requirements="C") for name, array in weights.items()}
    files.make_folder(os.path.dirname(path))
    place = f"{path}.unfinished"
    try:
        about = {} if description is None else {_DESCRIPTION: description.to_json()}
        sha256 = _checksum(arrays, arrays.__getitem__)
        save_file(arrays, place, {**metadata, **about, _SHA256: sha256})
        files.sync(place)
        files.rename(place, path)
    except (SafetensorError, OSError) as error:
        with contextlib.suppress(OSError):
            files.remove(place)
        full = disk_space.full_file(path, error)
        raise full or CheckpointError(f"cannot write {path}: {error}") from error


def _open(path: str) -> Any:
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated, damaged or not a safetensors file: {error}"
        ) from error


def _check_index(path: str, names: Sequence[str]) -> None:
    """Raises a CheckpointError if a shard that an index names is missing."""
    try:
        shards = sorted(set(bounded.read_json(path)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it has no weight_map ({error})") from error
    if missing := [shard for shard in shards if shard not in names]:
        raise CheckpointError(f"{path} names {missing[0]}, but the folder does not have it")


def _checksum(names: Iterable[str], read: Callable[[str], np.ndarray]) -> str:
    """Returns the SHA-256 of tensors, which are read one after the other."""
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode())
        digest.update(np.require(read(name), requirements="C").reshape(-1).view("u1").data)
    return digest.hexdigest()
