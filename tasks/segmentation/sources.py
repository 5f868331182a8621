"""Sources of images with masks: their base class, folders, and arrays."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split, load_split
from tekso.framework.params import param
from tekso.tasks.image.files import is_image_name
from tekso.tasks.image.packed_names import PackedNames
from tekso.tasks.image.sources import IMAGES, AnySource, as_images
from tekso.tasks.image.split_sources import SplitFolders

MASKS = "masks"
IGNORED = 255
"""Value of the pixels of a mask that do not count."""


@dataclasses.dataclass(frozen=True)
class MaskedImage:
    """A record of a `MaskSource`.

    Attributes:
      image: the bytes of an image file; or pixels, [height, width, channels] uint8.
      mask: the bytes of a PNG file; or [height, width] uint8: the class of every pixel, from 0, or
        `IGNORED`.
    """

    image: bytes | np.ndarray
    mask: bytes | np.ndarray


class MaskSource(AnySource):
    """Base class of sources whose records are `MaskedImage`s."""

    class Params(AnySource.Params):
        """Params of MaskSource."""


class SplitFolder(SplitFolders):
    """Base of the sources of files in a folder; a part of them, or another folder, is held out.

    Raises:
      InputError: the folder or the classes are not set, or a folder is missing.
    """

    class Params(SplitFolders.Params):
        """Params of SplitFolder."""

        classes: list[str] = param("Names of the classes, from class 0.", default=[])

    contents: str
    """What the folder has, for errors."""

    unit: str
    """What the files are, for errors."""

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        if params.folder and params.classes:
            return ""
        return (
            f"{params.path_of('folder')} is {params.folder!r} and classes is "
            f"{list(params.classes)}: set a folder {cls.contents}, and name the classes"
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        if why := self.unset(p, split):
            raise InputError(why)
        self.class_names = tuple(p.classes)
        self.root = self.own or p.folder

    def check_folder(self, folder: str) -> None:
        """Checks that a folder exists.

        Raises:
          InputError: it does not.
        """
        if not files.is_folder(folder):
            name = f"{self.split}_folder" if self.own else "folder"
            raise InputError(f"{self.params.path_of(name)}: there is no folder {folder!r}")

    def find(self, folder: str, is_wanted: Callable[[str], bool]) -> None:
        """Finds the files of the split in a folder, which are then the records.

        Raises:
          InputError: there are none.
        """
        self._folder = folder
        self._names = PackedNames(
            name for name in files.names(folder) if is_wanted(name) and self.takes(name)
        )
        if not len(self):
            raise InputError(
                f"{folder}: the split {self.split} has no {self.unit}{self.why_empty()}"
            )

    def __len__(self) -> int:
        return len(self._names)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(files.join(self._folder, self._names[index]))

    def fingerprint(self) -> str:
        """Returns a digest of the names of the files."""
        return digest(name.encode("utf-8", "surrogateescape") for name in self._names)


class LoadedArrays(AnySource):
    """Base of the sources in memory: two arrays of a method `load`, which a subclass checks.

    Raises:
      InputError: an array is missing.
    """

    class Params(AnySource.Params):
        """Params of LoadedArrays."""

    has_files = False
    array_names: ClassVar[tuple[str, str]]

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        found, what = load_split(self, split), f"{self.describe()}, split {split}"
        first, second = self.array_names
        if not isinstance(found, Mapping) or not {first, second} <= set(found):
            raise InputError(f"{what}: load() must return the arrays {first!r} and {second!r}")
        self._arrays = self._checked(what, found[first], found[second])

    def _checked(self, what: str, first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays of `load`.

        Args:
          what: the source and its split, for errors.
          first: the images or volumes.
          second: their labels.
        """
        raise NotImplementedError(f"{type(self).__name__} has no _checked(what, first, second)")

    def load(self, split: Split) -> Mapping[str, Any]:
        """Returns {name: array} of a split, with both names, the same in every call."""
        raise NotImplementedError(f"{type(self).__name__} has no load(split)")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"{self.describe()}, {self.split}", index, "record")

    def fingerprint(self) -> str:
        """Returns a digest of both arrays."""
        arrays = self._arrays
        return digest(f"{a.shape}".encode() + np.ascontiguousarray(a).tobytes() for a in arrays)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return type(self).__name__


class MaskFolders(SplitFolder, MaskSource):
    """Image files in a folder, and in another folder a mask for each, a PNG of the same name.

        cells/images/1.jpg    cells/masks/1.png

    A mask is a grey or palette image of 8 bits whose values (palette indices) are the classes; 255
    marks pixels that do not count.

    Raises:
      InputError: a folder is missing or has no images, or an image has no mask.
    """

    class Params(SplitFolder.Params, MaskSource.Params):
        """Params of MaskFolders."""

        folder: str = param("Folder with the folders images and masks.", default="")

    contents = "with the folders images and masks"
    unit = "images"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        images, folder = (files.join(self.root, name) for name in (IMAGES, MASKS))
        for one in (images, folder):
            self.check_folder(one)
        self.find(images, is_image_name)
        missing = set(map(_mask_name, self._names)) - set(files.names(folder))
        if missing:
            raise InputError(
                f"{len(missing)} images in {images} have no mask: there is no "
                f"{files.join(folder, min(missing))}"
            )

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"images with masks in {self.params.folder}"

    def _read(self, index: int) -> MaskedImage:
        origin = self.origin(index)
        mask = files.join(self.root, MASKS, _mask_name(self._names[index]))
        try:
            return MaskedImage(files.read(origin.file), files.read(mask))
        except OSError as error:
            raise BadRecordError(origin, reason_of(error)) from error


def _mask_name(image_name: str) -> str:
    return f"{os.path.splitext(image_name)[0]}.png"


class MaskArrays(LoadedArrays, MaskSource):
    """Images and masks in memory, from a method `load`.

        class Cells(MaskArrays):
            class_names = ("background", "cell")

            def load(self, split):
                x, masks = read_cells(split)
                return {"images": x, "masks": masks}

    Shapes:
      images: [n, height, width] or [n, height, width, channels], as of `ImageArrays`
      masks: [n, height, width] uint8, the classes from 0; 255: does not count
    Raises:
      InputError: an array is missing, or has a wrong shape or type.
    """

    class Params(LoadedArrays.Params, MaskSource.Params):
        """Params of MaskArrays."""

    array_names = (IMAGES, MASKS)

    def _checked(self, what: str, first: Any, second: Any) -> tuple[np.ndarray, np.ndarray]:
        self.images, self.masks = as_images(what, first), np.asarray(second)
        if self.masks.dtype != np.uint8 or self.masks.shape != self.images.shape[:3]:
            raise InputError(
                f"{what}: {MASKS!r} is {list(self.masks.shape)} {self.masks.dtype}, but must be "
                f"{list(self.images.shape[:3])} uint8, like {IMAGES!r}"
            )
        return self.images, self.masks

    def _read(self, index: int) -> MaskedImage:
        return MaskedImage(self.images[index], self.masks[index])


def decode_mask(mask: bytes | np.ndarray, origin: Origin) -> np.ndarray:
    """Returns the values of a mask, [height, width] uint8.

    Raises:
      BadRecordError: the file is no grey or palette image of 8 bits.
    """
    from PIL import Image

    if isinstance(mask, np.ndarray):
        return mask
    try:
        with Image.open(io.BytesIO(mask)) as image:
            image.load()
            mode, values = image.mode, np.asarray(image)
    except Exception as error:  # for damaged files, Pillow raises errors of a dozen classes
        raise BadRecordError(origin, f"its mask cannot be decoded: {error}") from error
    if mode not in ("L", "P", "1"):
        raise BadRecordError(
            origin, f"its mask has Pillow's mode {mode}, but must be grey or palette with 8 bits"
        )
    return values.astype(np.uint8)
