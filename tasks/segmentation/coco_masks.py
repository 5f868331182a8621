"""Masks of COCO's JSON: polygons and run-length codes become the class of every pixel."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.tasks.image.coco import CocoFile, CocoFiles
from tekso.tasks.segmentation.sources import IGNORED, MaskedImage, MaskSource

_BACKGROUND = "background"


class CocoMasks(CocoFiles, MaskSource):
    """Images in a folder, and the masks of their objects in a JSON file in the format of COCO.

        {"images": [{"id": 7, "file_name": "a.jpg", "height": 480, "width": 640}],
         "annotations": [{"image_id": 7, "category_id": 3, "segmentation": [[x, y, x, y, x, y]]}],
         "categories": [{"id": 3, "name": "car"}]}

    A `segmentation` is a list of polygons, or a run-length code: {"size": [height, width],
    "counts": …} with a list of numbers or COCO's compressed text. Class 0 is the background; the
    others are the categories in the order of their ids.

    Pixels that do not count: those of a crowd (`iscrowd`) outside of all objects, and those where
    objects of different classes overlap. An image with a malformed segmentation is skipped as a
    malformed image.

    Polygons need the package pycocotools (extra `images`).

    Raises:
      InputError: as `CocoFiles`; there are more than 254 categories.
    """

    class Params(CocoFiles.Params, MaskSource.Params):
        """Params of CocoMasks."""

    contents = "images with masks"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        self._regions: list[list[_Region]] = []
        self._sizes: list[tuple[int, int]] = []
        super().__init__(params, split=split)

    def _keep(self, found: CocoFile, chosen: list[int]) -> list[int]:
        if len(found.class_names) >= IGNORED:
            raise InputError(
                f"{self.file} has {len(found.class_names)} categories, but masks can have at most "
                f"{IGNORED - 1}"
            )
        self.class_names = (_BACKGROUND, *found.class_names)
        self._sizes = [found.sizes[i] for i in chosen]
        self._regions = [
            [
                _Region(
                    number, label, bool(one.get("iscrowd", 0)), _stored(one.get("segmentation"))
                )
                for number, label, one in found.annotations[i]
            ]
            for i in chosen
        ]
        return chosen

    def fingerprint(self) -> str:
        """Returns a digest of the names of the images and of their regions."""
        records = zip(self._names, self._sizes, self._regions, strict=True)
        return digest(
            f"{files.base_name(name)} {size} {regions}".encode("utf-8", "surrogateescape")
            for name, size, regions in records
        )

    def mask(self, index: int) -> np.ndarray:
        """Returns the mask of an image, [height, width] uint8.

        Raises:
          BadRecordError: a segmentation is malformed.
        """
        size = self._sizes[index]
        mask, crowd = np.zeros(size, np.uint8), np.zeros(size, bool)
        for region in self._regions[index]:
            try:
                inside = _decoded(json.loads(region.segmentation), size)
            except InputError:
                raise
            except ValueError as error:
                raise BadRecordError(
                    self.origin(index),
                    f"annotation {region.number} of {self.file} is malformed: {error}",
                ) from error
            if region.is_crowd:
                crowd |= inside
                continue
            overlaps = inside & (mask != 0) & (mask != region.label)
            mask[inside] = region.label
            mask[overlaps] = IGNORED
        mask[crowd & (mask == 0)] = IGNORED
        return mask

    def _read(self, index: int) -> MaskedImage:
        return MaskedImage(self.image(index), self.mask(index))


@dataclasses.dataclass(frozen=True)
class _Region:
    """An annotation.

    Attributes:
      number: its number in the file.
      label: its class, from 1.
      is_crowd: whether it is a group of objects.
      segmentation: its JSON, which takes less memory than objects.
    """

    number: int
    label: int
    is_crowd: bool
    segmentation: str


def _stored(segmentation: Any) -> str:
    return json.dumps(segmentation, separators=(",", ":"))


def _decoded(segmentation: Any, size: tuple[int, int]) -> np.ndarray:
    """Returns which pixels a segmentation covers, [height, width] bool.

    Raises:
      ValueError: it is malformed.
    """
    if isinstance(segmentation, list):
        return _of_polygons(segmentation, size)
    if isinstance(segmentation, dict):
        return _of_runs(segmentation, size)
    raise ValueError("it has no segmentation: expected polygons or a run-length code")


def _of_polygons(polygons: list[Any], size: tuple[int, int]) -> np.ndarray:
    try:
        from pycocotools import mask as coco
    except ModuleNotFoundError as error:
        raise InputError(
            "polygons need the package pycocotools: pip install 'tekso[images]'"
        ) from error

    if not polygons:
        raise ValueError("it has no polygons")
    for number, one in enumerate(polygons):
        values = _numbers(one)
        if values is None or len(values) < 6 or len(values) % 2:
            raise ValueError(f"polygon {number} must be a list of at least 3 pairs of x and y")
        # The time to fill a polygon grows with its sides.
        if not (np.abs(values) <= 2 * max(size) + 2).all():
            raise ValueError(f"polygon {number} lies far outside of the image")
    found: np.ndarray = coco.decode(coco.merge(coco.frPyObjects(polygons, *size)))
    return found.astype(bool)


def _of_runs(code: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    height, width = size
    if code.get("size") != [height, width]:
        raise ValueError(f"its size is {code.get('size')}, but the image has {[height, width]}")
    counts = code.get("counts")
    runs = _uncompressed(counts) if isinstance(counts, str) else _numbers(counts)
    if runs is None or (runs < 0).any() or (runs != np.floor(runs)).any():
        raise ValueError("its counts are neither numbers of pixels nor COCO's compressed text")
    if runs.sum() != height * width:
        raise ValueError(f"its counts sum to {runs.sum():.0f}, not to {height} × {width} pixels")
    values = np.repeat(np.arange(len(runs)) % 2 == 1, runs.astype(np.int64))
    return values.reshape(width, height).T  # runs go down the columns


def _numbers(values: Any) -> np.ndarray | None:
    """Returns a list of finite numbers as an array; None: it is something else."""
    if not isinstance(values, list) or any(type(v) not in (int, float) for v in values):
        return None
    found = np.asarray(values, np.float64)
    return found if np.isfinite(found).all() else None


def _uncompressed(text: str) -> np.ndarray | None:
    """Returns the runs of COCO's compressed text; None: it is malformed.

    A number has 5 bits in each character, the lowest first, with bit 5 set if further characters
    follow; the last character has the sign. From the fourth run on, it is the difference from the
    run two before.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 30:
            return None
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    return np.asarray(runs, np.float64) if shift == 0 else None
