"""Sources of images with boxes: their base class, and COCO's JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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

_BOX_NUMBERS = 4


@dataclasses.dataclass(frozen=True)
class Objects:
    """The objects of an image.

    Attributes:
      boxes: [n, 4] float64, [y_min, x_min, y_max, x_max] in pixels.
      labels: [n] int32, the classes, from 1; 0 is the background.
      is_crowd: [n] bool, boxes around groups of objects, which are not trained on; detections in
        them are neither right nor wrong.
      areas: [n] float64, areas of the objects in pixels.
      size: height and width of the image, in pixels.
    """

    boxes: np.ndarray
    labels: np.ndarray
    is_crowd: np.ndarray
    areas: np.ndarray
    size: tuple[int, int]

    @classmethod
    def of(
        cls,
        boxes: Any,
        labels: Any,
        size: tuple[int, int],
        *,
        is_crowd: Any = None,
        areas: Any = None,
    ) -> Objects:
        """Returns objects; by default there are no crowds, and the areas are those of the boxes.

        Boxes without height or width inside of the image are left out: they cannot be found.
        """
        boxes = np.asarray(boxes, np.float64).reshape(-1, _BOX_NUMBERS)
        labels = np.asarray(labels, np.int32).reshape(-1)
        crowd = np.zeros(len(boxes), bool) if is_crowd is None else np.asarray(is_crowd, bool)
        sides = boxes[:, 2:] - boxes[:, :2]
        own = np.prod(sides, axis=1) if areas is None else np.asarray(areas, np.float64)
        inside = np.clip(boxes, 0.0, [*size, *size])
        kept = np.all(inside[:, 2:] > inside[:, :2], axis=1)
        return cls(boxes[kept], labels[kept], crowd[kept], own[kept], size)


@dataclasses.dataclass(frozen=True)
class BoxedImage:
    """A record of a `BoxSource`.

    Attributes:
      image: the bytes of an image file; or pixels, [height, width, channels] uint8.
      objects: its objects.
    """

    image: bytes | np.ndarray
    objects: Objects


class BoxSource(AnySource):
    """Base class of sources whose records are `BoxedImage`s; class 1 is `class_names[0]`."""

    class Params(AnySource.Params):
        """Params of BoxSource."""

    def objects(self, index: int) -> Objects:
        """Returns the objects of an image without reading the image."""
        raise NotImplementedError(f"{type(self).__name__} has no objects(index)")

    def image(self, index: int) -> bytes | np.ndarray:
        """Returns the image of a record.

        Raises:
          BadRecordError: it cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no image(index)")

    def fingerprint(self) -> str:
        """Returns a digest of the names of the images and of the objects."""
        parts = []
        for index in range(len(self)):
            one = self.objects(index)
            origin = self.origin(index)
            parts.append(f"{files.base_name(origin.file)} {origin.offset} {one.size}".encode())
            parts += [array.tobytes() for array in (one.boxes, one.labels, one.is_crowd)]
        return digest(parts)

    def _read(self, index: int) -> BoxedImage:
        return BoxedImage(self.image(index), self.objects(index))


class CocoBoxes(BoxSource):
    """Images in a folder, and their boxes in a JSON file in the format of COCO.

        {"images": [{"id": 7, "file_name": "a.jpg", "height": 480, "width": 640}],
         "annotations": [{"image_id": 7, "category_id": 3, "bbox": [x, y, width, height]}],
         "categories": [{"id": 3, "name": "car"}]}

    `area` and `iscrowd` of an annotation are optional, and other keys are ignored. The classes are
    the categories in the order of their ids, which may have gaps. Boxes without height or width
    inside of the image are left out.

    Raises:
      InputError: the file is missing, is no such JSON, or refers to an unknown image or category.
    """

    class Params(BoxSource.Params):
        """Params of CocoBoxes."""

        file: str = param("JSON file of the training images.", default="")
        folder: str = param("Folder of the training images.", default="")
        dev_file: str = param("JSON file for dev; empty: hold out a part of `file`.", default="")
        dev_folder: str = param("Folder for dev; empty: as in training.", default="")
        test_file: str = param("JSON file for test; empty: hold out a part of `file`.", default="")
        test_folder: str = param("Folder for test; empty: as in training.", default="")
        dev_fraction: float = param(
            "Fraction of `file` for dev, without dev_file, chosen by a hash of the file's name.",
            default=0.1,
        )
        test_fraction: float = param("Fraction of `file` for test, without test_file.", default=0.0)
        train_on: Literal["all", "with_objects"] = param(
            "Training images: all, or those with a box that is no crowd.", default="all"
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        if not p.file:
            raise InputError(f"{p.path_of('file')} is empty: set a JSON file in COCO's format")
        check_fractions(p)
        own = {"train": "", "dev": p.dev_file, "test": p.test_file}[split]
        self._file = own or p.file
        found = _parsed(self._file)
        self.class_names = found.class_names
        folder = (p.get(f"{split}_folder") if split != "train" else "") or p.folder
        chosen = [i for i, name in enumerate(found.names) if own or self._is_chosen(name)]
        if split == "train" and p.train_on == "with_objects":
            chosen = [i for i in chosen if not found.objects[i].is_crowd.all()]
        if not chosen:
            why = why_empty(p, split, "file")
            raise InputError(f"{self._file}: the split {split} has no images{why}")
        self._paths = [files.join(folder, found.names[i]) for i in chosen]
        self._objects = [found.objects[i] for i in chosen]

    def __len__(self) -> int:
        return len(self._paths)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._paths[index])

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"images with boxes of {getattr(self, '_file', self.params.file)}"

    def objects(self, index: int) -> Objects:
        """See `BoxSource`."""
        return self._objects[index]

    def image(self, index: int) -> bytes:
        """See `BoxSource`."""
        path = self._paths[index]
        try:
            return files.read(path)
        except OSError as error:
            raise BadRecordError(Origin(path), reason_of(error)) from error

    def _is_chosen(self, name: str) -> bool:
        return split_of(name, *held_out_fractions(self.params, "file")) == self.split


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """The parts of a COCO file that are used."""

    class_names: tuple[str, ...]
    names: list[str]
    objects: list[Objects]


def _parsed(path: str) -> _Parsed:
    """Returns the parts of a COCO file that are used.

    Raises:
      InputError: see `CocoBoxes`.
    """
    try:
        data = json.loads(files.read(path))
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    lists = [
        data.get(key) if isinstance(data, Mapping) else None
        for key in ("images", "annotations", "categories")
    ]
    if not all(isinstance(one, Sequence) for one in lists):
        raise InputError(
            f"{path}: not in COCO's format: expected an object with the lists 'images', "
            "'annotations' and 'categories'"
        )
    try:
        return _converted(path, *lists)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: not in COCO's format: {what}") from error


def _converted(path: str, images: Any, annotations: Any, categories: Any) -> _Parsed:
    categories = sorted(categories, key=lambda one: one["id"])
    labels = {one["id"]: number for number, one in enumerate(categories, 1)}
    by_image: dict[Any, list[Any]] = {one["id"]: [] for one in images}
    for number, one in enumerate(annotations):
        if one["image_id"] not in by_image or one["category_id"] not in labels:
            raise InputError(
                f"{path}: annotation {number} has the image {one['image_id']!r} and the category "
                f"{one['category_id']!r}, but there is no such image or category"
            )
        x, y, width, height = map(float, one["bbox"])
        box = (y, x, y + height, x + width)
        crowd, area = bool(one.get("iscrowd", 0)), one.get("area", width * height)
        by_image[one["image_id"]].append((box, labels[one["category_id"]], crowd, area))
    objects = []
    for one in images:
        found = by_image[one["id"]]
        boxes, numbers, crowds, areas = zip(*found, strict=True) if found else ((),) * 4
        size = (int(one["height"]), int(one["width"]))
        objects.append(Objects.of(boxes, numbers, size, is_crowd=crowds, areas=areas))
    names = [str(one["file_name"]) for one in images]
    return _Parsed(tuple(str(one["name"]) for one in categories), names, objects)
