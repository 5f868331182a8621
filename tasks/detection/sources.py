"""Sources of images with boxes: their base class, and COCO's JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.input.sources import digest
from tekso.framework.params import param
from tekso.tasks.image.coco import CocoFile, CocoFiles
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


class CocoBoxes(CocoFiles, BoxSource):
    """Images in a folder, and their boxes in a JSON file in the format of COCO.

        {"images": [{"id": 7, "file_name": "a.jpg", "height": 480, "width": 640}],
         "annotations": [{"image_id": 7, "category_id": 3, "bbox": [x, y, width, height]}],
         "categories": [{"id": 3, "name": "car"}]}

    `area` and `iscrowd` of an annotation are optional, and other keys are ignored. The classes are
    the categories in the order of their ids, which may have gaps. Boxes without height or width
    inside of the image are left out.

    Raises:
      InputError: as `CocoFiles`.
    """

    class Params(CocoFiles.Params, BoxSource.Params):
        """Params of CocoBoxes."""

        train_on: Literal["all", "with_objects"] = param(
            "Training images: all, or those with a box that is no crowd.", default="all"
        )

    contents = "images with boxes"

    def _keep(self, found: CocoFile, chosen: list[int]) -> list[int]:
        self.class_names = found.class_names
        objects = [
            _objects(one, size) for one, size in zip(found.annotations, found.sizes, strict=True)
        ]
        if self.split == "train" and self.params.train_on == "with_objects":
            chosen = [i for i in chosen if not objects[i].is_crowd.all()]
        self._objects = [objects[i] for i in chosen]
        return chosen

    def objects(self, index: int) -> Objects:
        """See `BoxSource`."""
        return self._objects[index]


def _numbers(number: int, bbox: Any) -> list[float]:
    """Returns the numbers of a box.

    Raises:
      ValueError: it is malformed.
    """
    try:
        found = [float(one) for one in bbox]
    except (TypeError, ValueError):
        found = []
    if len(found) != _BOX_NUMBERS or not np.isfinite(found).all():
        raise ValueError(
            f"the bbox of annotation {number} is {bbox!r}, must be x, y, width and height"
        )
    return found


def _objects(annotations: Any, size: tuple[int, int]) -> Objects:
    found = []
    for number, label, one in annotations:
        x, y, width, height = _numbers(number, one["bbox"])
        box = (y, x, y + height, x + width)
        found.append((box, label, bool(one.get("iscrowd", 0)), one.get("area", width * height)))
    boxes, labels, crowds, areas = zip(*found, strict=True) if found else ((),) * 4
    return Objects.of(boxes, labels, size, is_crowd=crowds, areas=areas)
