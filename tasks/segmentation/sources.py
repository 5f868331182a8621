"""Sources of images with masks: their base class, folders, and arrays."""

from __future__ import annotations

import dataclasses
import io
import os
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
from tekso.tasks.image.files import is_image_name
from tekso.tasks.image.sources import IMAGES, AnySource, as_images

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


class MaskFolders(MaskSource):
    """Image files in a folder, and in another folder a mask for each, a PNG of the same name.

        cells/images/1.jpg    cells/masks/1.png

    A mask is a grey or palette image of 8 bits whose values (palette indices) are the classes; 255
    marks pixels that do not count.

    Raises:
      InputError: a folder is missing or has no images, or an image has no mask.
    """

    class Params(MaskSource.Params):
        """Params of MaskFolders."""

        folder: str = param("Folder with the folders images and masks.", default="")
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
                "folder with the folders images and masks, and name the classes"
            )
        check_fractions(p)
        self.class_names = tuple(p.classes)
        own = {"train": "", "dev": p.dev_folder, "test": p.test_folder}[split]
        root = own or p.folder
        images = files.join(root, IMAGES)
        for folder in (images, files.join(root, MASKS)):
            if not files.is_folder(folder):
                name = f"{split}_folder" if own else "folder"
                raise InputError(f"{p.path_of(name)}: there is no folder {folder!r}")
        fractions = held_out_fractions(p, "folder")
        names = [
            name
            for name in files.names(images)
            if is_image_name(name) and (own or split_of(name, *fractions) == split)
        ]
        if not names:
            why = why_empty(p, split, "folder")
            raise InputError(f"{images}: the split {split} has no images{why}")
        self._images = [files.join(images, name) for name in names]
        masks = [f"{os.path.splitext(name)[0]}.png" for name in names]
        self._masks = [files.join(root, MASKS, name) for name in masks]
        missing = set(masks) - set(files.names(files.join(root, MASKS)))
        if missing:
            raise InputError(
                f"{len(missing)} images in {images} have no mask: there is no "
                f"{files.join(root, MASKS, min(missing))}"
            )

    def __len__(self) -> int:
        return len(self._images)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._images[index])

    def fingerprint(self) -> str:
        """Returns a digest of the names of the files."""
        return digest(files.base_name(path).encode() for path in self._images)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"images with masks in {self.params.folder}"

    def _read(self, index: int) -> MaskedImage:
        path = self._images[index]
        try:
            return MaskedImage(files.read(path), files.read(self._masks[index]))
        except OSError as error:
            raise BadRecordError(Origin(path), reason_of(error)) from error


class MaskArrays(MaskSource):
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

    class Params(MaskSource.Params):
        """Params of MaskArrays."""

    has_files = False

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        found, what = self.load(split), f"{self.describe()}, split {split}"
        if not isinstance(found, Mapping) or not {IMAGES, MASKS} <= set(found):
            raise InputError(f"{what}: load() must return the arrays {IMAGES!r} and {MASKS!r}")
        self.images, self.masks = as_images(what, found[IMAGES]), np.asarray(found[MASKS])
        if self.masks.dtype != np.uint8 or self.masks.shape != self.images.shape[:3]:
            raise InputError(
                f"{what}: {MASKS!r} is {list(self.masks.shape)} {self.masks.dtype}, but must be "
                f"{list(self.images.shape[:3])} uint8, like {IMAGES!r}"
            )

    def load(self, split: Split) -> Mapping[str, Any]:
        """Returns {"images": array, "masks": array} of a split, the same in every call."""
        raise NotImplementedError(f"{type(self).__name__} has no load(split)")

    def __len__(self) -> int:
        return len(self.images)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"{self.describe()}, {self.split}", index, "record")

    def fingerprint(self) -> str:
        """Returns a digest of images and masks."""
        arrays = (self.images, self.masks)
        return digest(f"{a.shape}".encode() + np.ascontiguousarray(a).tobytes() for a in arrays)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return type(self).__name__

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
