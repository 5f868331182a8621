"""Average precision of held-out images, and pictures of what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tekso.framework.input.input import Input
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program, Scored
from tekso.tasks.classification.task import WEIGHTS, X
from tekso.tasks.detection.average_precision import (
    AP_50,
    DetectedObjects,
    average_precision,
    pycocotools_modules,
)
from tekso.tasks.detection.drawing import LABEL_COLOUR, with_boxes
from tekso.tasks.detection.input import BoxImages, boxes_of, objects_of
from tekso.tasks.detection.sources import Objects
from tekso.tasks.image import drawing
from tekso.tasks.image.preparation import pixels_of
from tekso.tasks.image.sources import class_name
from tekso.tasks.image.steps import Image


class DetectionScoring(Configurable):
    """Detects objects in the images of every evaluation, and compares them with the labels.

    Raises:
      InputError: pycocotools is not installed.
      ValueError: a number is out of range.
    """

    class Params(Configurable.Params):
        """Params of DetectionScoring."""

        shown: int = param("Images that the last evaluation draws with boxes.", default=16)
        shown_score: float = param("Least score of a box that is drawn.", default=0.3)
        baselines: dict[str, float] = param(
            "AP at the overlap 0.5 of other methods on the same images by name, printed beside the "
            "model's.",
            default={},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.shown < 0:
            raise ValueError(
                f"{self.params.path_of('shown')} is {self.params.shown}, but must be at least 0"
            )
        pycocotools_modules()

    def score(
        self,
        program: Program,
        answer: Callable[..., Mapping[str, Any]],
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool],
    ) -> Scored | None:
        """Returns COCO's figures and pictures; see `Task.score`.

        Args:
          program: calls functions with the weights.
          answer: function(theta, x, ctx) that returns "boxes", "labels" and "scores".
          input: an evaluation input of images with boxes.
          is_last: whether to draw pictures.
          stopped: returns whether to stop early.
        """
        images = boxes_of(input)
        truths: list[Objects] = []
        found: list[DetectedObjects] = []
        pictures: list[tuple[np.ndarray, Objects, DetectedObjects]] = []
        for step in range(input.num_batches or 0):
            batch, own = input.batch(step), objects_of(images, input.inner_step(step))
            arrays = {k: np.asarray(v) for k, v in program.call(answer, batch[X]).items()}
            if stopped():
                return None
            for row, objects in enumerate(own):
                if batch[WEIGHTS][row] == 0:  # the image is malformed
                    continue
                one = found_in({k: v[row] for k, v in arrays.items()}, objects.size)
                truths.append(objects)
                found.append(one)
                if is_last and len(pictures) < self.params.shown:
                    pictures.append((pixels_of(batch[X][row], images.params), objects, one))
        num_classes = images.num_classes or max(
            [1, *(int(max(t.labels, default=1)) for t in truths)]
        )
        scores = average_precision(truths, found, num_classes=num_classes)
        names = [class_name(images.class_names, i) for i in range(num_classes)]
        drawn = {"detections": self._drawn(pictures, images)} if pictures else {}
        text = "\n".join(scores.lines(names)) if is_last else ""
        notes = self._notes(scores.figures, len(truths)) if is_last else ()
        return Scored(scores.figures, text, drawn, notes)

    def _notes(self, figures: Mapping[str, float], count: int) -> tuple[str, ...]:
        if not self.params.baselines or AP_50 not in figures:
            return ()
        others = ", ".join(f"{name} {value:.3f}" for name, value in self.params.baselines.items())
        return (f"AP at the overlap 0.5 on {count:,} images {figures[AP_50]:.3f}; {others}",)

    def _drawn(
        self,
        pictures: list[tuple[np.ndarray, Objects, DetectedObjects]],
        images: BoxImages,
    ) -> bytes:
        """Returns a PNG of images with the labels in green and what was found in red."""
        drawn, titles = [], []
        for pixels, objects, found in pictures:
            scale = np.array([*objects.size, *objects.size], np.float64)
            labelled = with_boxes(
                pixels, objects.boxes / scale, [""] * len(objects.boxes), colour=LABEL_COLOUR
            )
            least, names = self.params.shown_score, images.class_names
            drawn.append(with_found(labelled, found, objects.size, names, least_score=least))
            count = (found.scores >= least).sum()
            titles.append(f"{count} found, {len(objects.boxes)} labelled")
        return drawing.gallery(drawn, titles, title=f"boxes in {images.params.split}")


def found_in(arrays: Mapping[str, np.ndarray], size: tuple[int, int]) -> DetectedObjects:
    """Returns the detections of an image, in pixels of the image.

    Args:
      arrays: "boxes" [n, 4] in shares, "labels" and "scores" [n]; label 0: none.
      size: height and width of the image.
    """
    real = arrays["labels"] > 0
    boxes = np.clip(arrays["boxes"][real], 0.0, 1.0) * np.array([*size, *size])
    return DetectedObjects(boxes, arrays["labels"][real], arrays["scores"][real])


def with_found(
    image: Image,
    found: DetectedObjects,
    size: tuple[int, int],
    names: tuple[str, ...],
    *,
    least_score: float,
) -> Image:
    """Returns an image with the boxes, classes and scores of what was found in it.

    Args:
      image: the pixels, in any size.
      found: the objects.
      size: height and width of the image to which the boxes of the objects refer.
      names: names of the classes; the model may have more.
      least_score: objects with a smaller score are not drawn.

    Shapes:
      image: [height, width, 1 or 3] uint8
      returns: [any height, any width, 3] uint8; see `with_boxes`
    """
    sure = found.scores >= least_score
    rows = zip(found.labels[sure], found.scores[sure], strict=True)
    captions = [f"{class_name(names, n - 1)} {score:.2f}" for n, score in rows]
    return with_boxes(image, found.boxes[sure] / np.array([*size, *size]), captions)
