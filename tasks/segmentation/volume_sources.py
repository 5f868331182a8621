"""Sources of volumes with a class for every voxel: their base class, folders, and arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.image.sources import AnySource
from tekso.tasks.segmentation.sources import LoadedArrays, SplitFolder

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


class VolumeFolders(SplitFolder, VolumeSource):
    """A folder of .npz files, each with the arrays "volume" and "labels".

    The volumes may differ in size.

    Shapes:
      volume: [depth, height, width] or [depth, height, width, channels], numbers
      labels: [depth, height, width] integers, the classes from 0; 255: does not count
    Raises:
      InputError: a folder is missing or has no .npz files.
    """

    class Params(SplitFolder.Params, VolumeSource.Params):
        """Params of VolumeFolders."""

        folder: str = param("Folder of .npz files.", default="")

    contents = "of .npz files"
    unit = f"{_ENDING} files"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        self.check_folder(self.root)
        self.find(self.root, lambda name: name.endswith(_ENDING))

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"volumes in {self.params.folder}"

    def _read(self, index: int) -> LabelledVolume:
        origin = self.origin(index)
        arrays = read_arrays(origin.file, (VOLUME, LABELS))
        return _checked(arrays[VOLUME], arrays[LABELS], origin)


class VolumeArrays(LoadedArrays, VolumeSource):
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

    class Params(LoadedArrays.Params, VolumeSource.Params):
        """Params of VolumeArrays."""

    array_names = (VOLUMES, LABELS)

    def _checked(self, what: str, first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
        self.volumes, self.labels = np.asarray(first), np.asarray(second)
        if self.volumes.ndim == 4:
            self.volumes = self.volumes[..., None]
        is_shape = self.volumes.ndim == 5 and self.labels.shape == self.volumes.shape[:4]
        if not is_shape or not len(self.volumes):
            raise InputError(
                f"{what}: {VOLUMES!r} is {list(np.shape(first))} and {LABELS!r} is "
                f"{list(self.labels.shape)}, but must be [n, depth, height, width], the first one "
                "optionally with channels"
            )
        return self.volumes, self.labels

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
