"""Sources of volumes with a class for every voxel: their base class, folders, and arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.skips import BadRecordError, InputError, Origin, reason_of
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import (
    Split,
    check_fractions,
    held_out_fractions,
    split_of,
    why_empty,
)
from tekso.framework.params import param
from tekso.tasks.image.sources import AnySource

VOLUME, VOLUMES, LABELS = "volume", "volumes", "labels"
_ENDING = ".npz"


@dataclasses.dataclass(frozen=True)
class LabelledVolume:
    """A record of a `VolumeSource`.

    Attributes:
      volume: [depth, height, width, channels], numbers.
      labels: [depth, height, width] integers: the class of every voxel, from 0, or `IGNORED`.
    """

    volume: np.ndarray
    labels: np.ndarray


class VolumeSource(AnySource):
    """Base class of sources whose records are `LabelledVolume`s."""

    class Params(AnySource.Params):
        """Params of VolumeSource."""


class VolumeFolders(VolumeSource):
    """A folder of .npz files, each with the arrays "volume" and "labels".

    The volumes may differ in size.

    Shapes:
      volume: [depth, height, width] or [depth, height, width, channels], numbers
      labels: [depth, height, width] integers, the classes from 0; 255: does not count
    Raises:
      InputError: a folder is missing or has no .npz files.
    """

    class Params(VolumeSource.Params):
        """Params of VolumeFolders."""

        folder: str = param("Folder of .npz files.", default="")
        dev_folder: str = param("Folder for dev; empty: hold out a part of `folder`.", default="")
        test_folder: str = param("Folder for test; empty: hold out a part of `folder`.", default="")
        dev_fraction: float = param(
            "Fraction of `folder` for dev, without dev_folder, chosen by a hash of the name.",
            default=0.1,
        )
        test_fraction: float = param(
            "Fraction of `folder` for test, without test_folder.", default=0.0
        )
        classes: list[str] = param("Names of the classes, from class 0.", default=[])

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        if not p.folder or not p.classes:
            raise InputError(
                f"{p.path_of('folder')} is {p.folder!r} and classes is {list(p.classes)}: set a "
                "folder of .npz files, and name the classes"
            )
        check_fractions(p)
        self.class_names = tuple(p.classes)
        own = {"train": "", "dev": p.dev_folder, "test": p.test_folder}[split]
        root = own or p.folder
        if not files.is_folder(root):
            name = f"{split}_folder" if own else "folder"
            raise InputError(f"{p.path_of(name)}: there is no folder {root!r}")
        fractions = held_out_fractions(p, "folder")
        self._paths = [
            files.join(root, name)
            for name in sorted(files.names(root))
            if name.endswith(_ENDING) and (own or split_of(name, *fractions) == split)
        ]
        if not self._paths:
            why = why_empty(p, split, "folder")
            raise InputError(f"{root}: the split {split} has no {_ENDING} files{why}")

    def __len__(self) -> int:
        return len(self._paths)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._paths[index])

    def fingerprint(self) -> str:
        """Returns a digest of the names of the files."""
        return digest(files.base_name(path).encode() for path in self._paths)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"volumes in {self.params.folder}"

    def _read(self, index: int) -> LabelledVolume:
        path = self._paths[index]
        arrays = read_arrays(path, (VOLUME, LABELS))
        return _checked(arrays[VOLUME], arrays[LABELS], Origin(path))


class VolumeArrays(VolumeSource):
    """Volumes and labels in memory, from a method `load`.

        class Scans(VolumeArrays):
            class_names = ("background", "vessel")

            def load(self, split):
                x, labels = read_scans(split)
                return {"volumes": x, "labels": labels}

    Shapes:
      volumes: [n, depth, height, width] or [n, depth, height, width, channels], numbers
      labels: [n, depth, height, width] integers, the classes from 0; 255: does not count
    Raises:
      InputError: an array is missing, or has a wrong shape or type.
    """

    class Params(VolumeSource.Params):
        """Params of VolumeArrays."""

    has_files = False

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        found, what = self.load(split), f"{self.describe()}, split {split}"
        if not isinstance(found, Mapping) or not {VOLUMES, LABELS} <= set(found):
            raise InputError(f"{what}: load() must return the arrays {VOLUMES!r} and {LABELS!r}")
        self.volumes, self.labels = np.asarray(found[VOLUMES]), np.asarray(found[LABELS])
        if self.volumes.ndim == 4:
            self.volumes = self.volumes[..., None]
        is_shape = self.volumes.ndim == 5 and self.labels.shape == self.volumes.shape[:4]
        if not is_shape or not len(self.volumes):
            raise InputError(
                f"{what}: {VOLUMES!r} is {list(np.shape(found[VOLUMES]))} and {LABELS!r} is "
                f"{list(self.labels.shape)}, but must be [n, depth, height, width], the first one "
                "optionally with channels"
            )

    def load(self, split: Split) -> Mapping[str, Any]:
        """Returns {"volumes": array, "labels": array} of a split, the same in every call."""
        raise NotImplementedError(f"{type(self).__name__} has no load(split)")

    def __len__(self) -> int:
        return len(self.volumes)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"{self.describe()}, {self.split}", index, "record")

    def fingerprint(self) -> str:
        """Returns a digest of volumes and labels."""
        arrays = (self.volumes, self.labels)
        return digest(f"{a.shape}".encode() + np.ascontiguousarray(a).tobytes() for a in arrays)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return type(self).__name__

    def _read(self, index: int) -> LabelledVolume:
        return _checked(self.volumes[index], self.labels[index], self.origin(index))


def read_volume(path: str) -> np.ndarray:
    """Returns the array "volume" of an .npz file, [depth, height, width, channels].

    Raises:
      BadRecordError: the file cannot be read, or has no such array.
    """
    return _with_channels(read_arrays(path, (VOLUME,))[VOLUME], Origin(path))


def read_arrays(path: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz file.

    Raises:
      BadRecordError: the file cannot be read, or lacks an array.
    """
    try:
        with files.open(path) as file, np.load(file) as archive:
            missing = [name for name in names if name not in archive.files]
            if not missing:
                return {name: archive[name] for name in names}
            given = ", ".join(archive.files) or "none"
    except OSError as error:
        raise BadRecordError(Origin(path), reason_of(error)) from error
    except Exception as error:  # NumPy raises errors of several classes for damaged files
        raise BadRecordError(Origin(path), f"not a readable .npz file: {error}") from error
    raise BadRecordError(Origin(path), f"it has no array {missing[0]!r}, but {given}")


def _checked(volume: np.ndarray, labels: np.ndarray, origin: Origin) -> LabelledVolume:
    volume = _with_channels(volume, origin)
    if labels.shape != volume.shape[:3] or not np.issubdtype(labels.dtype, np.integer):
        raise BadRecordError(
            origin,
            f"{LABELS!r} is {list(labels.shape)} {labels.dtype}, but must be "
            f"{list(volume.shape[:3])} integers, like the volume",
        )
    return LabelledVolume(volume, labels)


def _with_channels(volume: np.ndarray, origin: Origin) -> np.ndarray:
    is_number = volume.dtype == bool or np.issubdtype(volume.dtype, np.number)
    if volume.ndim not in (3, 4) or not volume.size or not is_number:
        raise BadRecordError(
            origin,
            f"{VOLUME!r} is {list(volume.shape)} {volume.dtype}, but must be numbers [depth, "
            "height, width] or [depth, height, width, channels]",
        )
    return volume[..., None] if volume.ndim == 3 else volume
