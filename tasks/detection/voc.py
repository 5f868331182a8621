"""Images with boxes in Pascal VOC's XML files, whole or cut into tiles."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any
from xml.etree import ElementTree

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.detection.sources import BoxSource, Objects
from tekso.tasks.image.decoding import SUFFIXES, decode

_SIDES = (("ymin", 1), ("xmin", 1), ("ymax", 0), ("xmax", 0))
"""The sides of a box, and what is subtracted: boxes here begin at 0 and exclude their last side."""


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A part of an image."""

    path: str
    top: int
    left: int
    objects: Objects


class VocBoxes(BoxSource):
    """Images with an XML file of the same name beside each, in the format of Pascal VOC.

    Its pixels are counted from 1, and a box includes its last ones: xmin 1 and xmax 20 are the
    first 20 columns.

    With `tile`, an image is cut into squares, which overlap as little as is needed to cover it. A
    box belongs to a tile if at least half of its area is inside, and is cut at the border. Objects
    that are marked as difficult are treated as crowds.

    Raises:
      InputError: a file is missing or malformed, or an object has an unknown class.
    """

    class Params(BoxSource.Params):
        """Params of VocBoxes."""

        folder: str = param("Folder of the files.", default="")
        files: list[str] = param("XML files for training: names or globs.", default=["*.xml"])
        dev_files: list[str] = param("XML files for dev.", default=[])
        test_files: list[str] = param("XML files for test.", default=[])
        classes: list[str] = param("Names of the classes, from class 1.", default=[])
        tile: int | None = param("Side of a tile in pixels; None: whole images.", default=None)

    package = ""
    """Sentence that says where to get the files; for errors."""

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        if not params.classes or (params.tile is not None and params.tile < 1):
            return (
                f"{params.path_of('classes')} is {list(params.classes)} and tile is {params.tile}: "
                "name the classes, and let a tile have at least 1 pixel"
            )
        name = "files" if split == "train" else f"{split}_files"
        if params.get(name):
            return ""
        return f"{params.path_of(name)} is empty: name the XML files of the split {split}"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        if why := self.unset(p, split):
            raise InputError(why)
        self.class_names = tuple(p.classes)
        name = "files" if split == "train" else f"{split}_files"
        self._tiles = [
            tile
            for pattern in p.get(name)
            for path in self._found(pattern, name)
            for tile in self._cut(path)
        ]
        self._lock = threading.Lock()
        self._pixels: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._tiles)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        one = self._tiles[index]
        return Origin(one.path if self.params.tile is None else f"{one.path}, {one.top}:{one.left}")

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"images with boxes in {self.params.folder or '.'}"

    def objects(self, index: int) -> Objects:
        """See `BoxSource`."""
        return self._tiles[index].objects

    def image(self, index: int) -> bytes | np.ndarray:
        """See `BoxSource`; the images that are cut into tiles stay in memory."""
        one = self._tiles[index]
        try:
            if self.params.tile is None:
                return files.read(one.path)
            with self._lock:
                if one.path not in self._pixels:
                    data, origin = files.read(one.path), Origin(one.path)
                    pixels = decode(data, channels=3, background=255, origin=origin)
                    self._pixels[one.path] = pixels
            height, width = one.objects.size
            rows = slice(one.top, one.top + height)
            return self._pixels[one.path][rows, one.left : one.left + width]
        except OSError as error:
            raise BadRecordError(Origin(one.path), reason_of(error)) from error

    def _found(self, pattern: str, name: str) -> list[str]:
        path = files.join(self.params.folder, pattern)
        try:
            return files.glob(path, what=self.params.path_of(name))
        except (OSError, InputError) as error:
            raise InputError(f"{error}. {self.package}".strip()) from error

    def _cut(self, path: str) -> list[_Tile]:
        objects, image = self._parsed(path), _image_beside(path)
        if self.params.tile is None:
            return [_Tile(image, 0, 0, objects)]
        height, width = objects.size
        side = self.params.tile
        return [
            _Tile(
                image, top, left, _inside(objects, top, left, min(side, height), min(side, width))
            )
            for top in _starts(height, side)
            for left in _starts(width, side)
        ]

    def _parsed(self, path: str) -> Objects:
        """Returns the objects in an XML file."""
        numbers = {name: number for number, name in enumerate(self.class_names, 1)}
        try:
            root = ElementTree.fromstring(files.read(path))
            size = (_number(root, "size/height"), _number(root, "size/width"))
            boxes, labels, crowds = [], [], []
            for one in root.iter("object"):
                name = one.findtext("name") or ""
                if name not in numbers:
                    raise InputError(
                        f"{path}: the class {name!r} is none of {', '.join(self.class_names)}: "
                        f"add it to {self.params.path_of('classes')}"
                    )
                boxes.append([_number(one, f"bndbox/{side}") - first for side, first in _SIDES])
                labels.append(numbers[name])
                crowds.append((one.findtext("difficult") or "0").strip() == "1")
        except (ElementTree.ParseError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: not an XML file of Pascal VOC: {error}") from error
        return Objects.of(boxes, labels, (int(size[0]), int(size[1])), is_crowd=crowds)


def _number(element: Any, path: str) -> float:
    text = element.findtext(path)
    if text is None:
        raise ValueError(f"an element has no {path}")
    return float(text)


def _image_beside(path: str) -> str:
    """Returns the path of the image of an XML file.

    Raises:
      InputError: there is none.
    """
    stem = os.path.splitext(path)[0]
    for suffix in SUFFIXES:
        for one in (stem + suffix, stem + suffix.upper()):
            if files.exists(one):
                return one
    raise InputError(f"{path}: there is no image {stem} with one of {', '.join(SUFFIXES)}")


def _starts(size: int, side: int) -> list[int]:
    """Returns the first pixels of the fewest tiles that cover `size` pixels, evenly spaced."""
    count = max(1, -(-size // side))
    return [i * (size - side) // (count - 1) for i in range(count)] if count > 1 else [0]


def _inside(objects: Objects, top: int, left: int, height: int, width: int) -> Objects:
    corner = np.array([top, left] * 2, np.float64)
    boxes = np.clip(objects.boxes - corner, 0, [height, width] * 2)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    whole = np.prod(objects.boxes[:, 2:] - objects.boxes[:, :2], axis=1)
    kept = areas >= 0.5 * whole
    return Objects.of(
        boxes[kept], objects.labels[kept], (height, width), is_crowd=objects.is_crowd[kept]
    )


class DeepforestTrees(VocBoxes):
    """Crowns of trees from the air, in squares of 300 pixels: data of the package deepforest.

    574 trees at one place for training; for dev, 279 trees at another place. Tiles overlap, so that
    some trees are in two of them.
    """

    class Params(VocBoxes.Params):
        """Params of DeepforestTrees."""

        folder: str = param("The folder deepforest/data of the package.", default="")
        files: list[str] = param(
            "XML files for training.", default=["2019_YELL_2_528000_4978000_image_crop2.xml"]
        )
        dev_files: list[str] = param(
            "XML files for dev.", default=["2019_YELL_2_541000_4977000_image_crop.xml"]
        )
        test_files: list[str] = param("XML files for test.", default=["OSBS_029.xml"])
        classes: list[str] = param("Names of the classes.", default=["Tree"])
        tile: int | None = param("Side of a tile in pixels.", default=300)

    package = (
        "The files are in the package deepforest: pip download --no-deps deepforest==2.1.0 && "
        "unzip deepforest-*.whl 'deepforest/data/*', and set the folder deepforest/data"
    )
