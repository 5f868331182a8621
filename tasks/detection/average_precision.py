"""Average precision of detections as COCO defines it, by pycocotools."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.tables import table
from tekso.tasks.detection.sources import Objects

AP, AP_50, AP_75 = "ap", "ap_50", "ap_75"
_STATS = {AP: 0, AP_50: 1, AP_75: 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar_100": 8}
"""{figure: its place in COCOeval.stats}."""
NAMES = tuple(_STATS)
"""Names of all figures."""


@dataclasses.dataclass(frozen=True)
class DetectedObjects:
    """The detections of an image.

    Attributes:
      boxes: [n, 4], [y_min, x_min, y_max, x_max] in pixels.
      labels: [n] int, from 1.
      scores: [n].
    """

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class AveragePrecision:
    """Average precision over a data set.

    Attributes:
      figures: {"ap": the mean over classes and the overlaps 0.5, 0.55, …, 0.95; "ap_50", "ap_75":
        at one overlap; "ap_small", "ap_medium", "ap_large": of objects with areas up to 32² and 96²
        pixels, and above; "ar_100": recall with 100 detections of an image}. Figures without an
        object are left out.
      by_class: {class: (AP, AP at the overlap 0.5)}, of the classes with an object.
    """

    figures: dict[str, float]
    by_class: dict[int, tuple[float, float]]

    def lines(self, names: Sequence[str]) -> list[str]:
        """Returns the figures, and those of every class, as tables."""
        header = list(self.figures)
        lines = table(header, [[f"{v:.3f}" for v in self.figures.values()]], right=range(9))
        rows = [[names[c - 1], *(f"{v:.3f}" for v in pair)] for c, pair in self.by_class.items()]
        return [*lines, "", *table(("class", AP, AP_50), rows, right=(1, 2))]


def pycocotools_modules() -> Any:
    """Returns the classes COCO and COCOeval of the package pycocotools.

    Raises:
      InputError: it is not installed.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise InputError(
            "average precision needs the package pycocotools: pip install 'tekso[images]', or do "
            "not detect in evaluations: --set task.scoring=None"
        ) from error
    return COCO, COCOeval


def average_precision(
    truths: Sequence[Objects], found: Sequence[DetectedObjects], *, num_classes: int
) -> AveragePrecision:
    """Returns COCO's figures for the detections of some images.

    Crowds are no objects to be found; a detection inside of one is neither right nor wrong. At most
    100 detections of an image and class count.

    Args:
      truths: the objects of every image.
      found: the detections of every image, in the same order.
      num_classes: number of classes without the background.

    Raises:
      InputError: pycocotools is not installed.
    """
    coco_class, evaluation_class = pycocotools_modules()
    with contextlib.redirect_stdout(io.StringIO()):
        coco = coco_class()
        coco.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(len(truths))],
            "categories": [{"id": c} for c in range(1, num_classes + 1)],
            "annotations": _annotations(truths),
        }
        coco.createIndex()
        results = coco_class()
        results.dataset = {**coco.dataset, "annotations": _results(found)}
        results.createIndex()
        evaluation = evaluation_class(coco, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = {name: float(evaluation.stats[place]) for name, place in _STATS.items()}
    # [overlaps, recalls, classes, all areas, 100 detections]; -1: no object
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    by_class = {
        c: (float(one.mean()), float(one[0].mean()))
        for c, one in enumerate(np.moveaxis(precision, 2, 0), 1)
        if one.min() >= 0
    }
    return AveragePrecision({k: v for k, v in figures.items() if v >= 0}, by_class)


def _annotations(truths: Sequence[Objects]) -> list[dict[str, Any]]:
    annotations: list[dict[str, Any]] = []
    for image, objects in enumerate(truths):
        rows = zip(objects.boxes, objects.labels, objects.is_crowd, objects.areas, strict=True)
        for box, label, crowd, area in rows:
            number = len(annotations) + 1  # 0 would mean "no match" to COCOeval
            one = {"id": number, "image_id": image, "category_id": int(label), "bbox": _sides(box)}
            annotations.append({**one, "iscrowd": int(crowd), "area": float(area)})
    return annotations


def _results(found: Sequence[DetectedObjects]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for image, one in enumerate(found):
        for box, label, score in zip(one.boxes, one.labels, one.scores, strict=True):
            sides = _sides(box)
            result = {"id": len(results) + 1, "image_id": image, "category_id": int(label)}
            area = {"bbox": sides, "area": sides[2] * sides[3], "iscrowd": 0}
            results.append({**result, **area, "score": float(score)})
    return results


def _sides(box: np.ndarray) -> list[float]:
    """Returns COCO's [x, y, width, height] of a box."""
    y_min, x_min, y_max, x_max = map(float, box)
    return [x_min, y_min, x_max - x_min, y_max - y_min]
