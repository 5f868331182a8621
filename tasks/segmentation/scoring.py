"""Pictures of labels and guesses for pixels, and the IoU of every class."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tekso.framework.input.input import Input
from tekso.framework.params import Configurable, param
from tekso.framework.tables import table
from tekso.framework.task import Program, Scored
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image import drawing
from tekso.tasks.image.scoring import confusions
from tekso.tasks.image.sources import class_name
from tekso.tasks.image.steps import Image
from tekso.tasks.segmentation.input import NOT_COUNTED


class SegmentationScoring(Configurable):
    """Segments held-out images once more; shows images, labels and guesses side by side.

    Raises:
      ValueError: a number is out of range.
    """

    class Params(Configurable.Params):
        """Params of SegmentationScoring."""

        shown: int = param("Images that are drawn.", default=12)
        baselines: dict[str, float] = param(
            "Mean IoU of other methods on the same images by name, printed beside the model's.",
            default={},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.shown < 0:
            raise ValueError(
                f"{self.params.path_of('shown')} is {self.params.shown}, but must be at least 0"
            )

    def score(
        self,
        program: Program,
        answer: Callable[..., Mapping[str, Any]],
        input: Input,
        *,
        images: Any,
        num_classes: int,
        stopped: Callable[[], bool],
    ) -> Scored | None:
        """Returns the IoU of every class as text, and pictures; see `Task.score`.

        Args:
          program: calls functions with the weights.
          answer: function(theta, x, ctx) that returns the "labels" of every pixel.
          input: an evaluation input.
          images: the `MaskImages` or `Volumes` of the input.
          num_classes: number of classes of the task.
          stopped: returns whether to stop early.
        """
        counts = np.zeros((num_classes, num_classes), np.int64)
        drawn: list[Image] = []
        for step in range(input.num_batches or 0):
            batch = input.batch(step)
            guess = np.asarray(program.call(answer, batch[X])[LABELS])
            if stopped():
                return None
            real = batch[WEIGHTS] > 0
            labels, guess, x = batch[LABELS][real], guess[real], batch[X][real]
            counted = labels != NOT_COUNTED
            counts += confusions(labels[counted], guess[counted], num_classes)
            for row in range(min(len(x), self.params.shown - len(drawn))):
                rows = images.section(labels[row]), images.section(guess[row])
                drawn.append(side_by_side(images.drawn(x[row]), *rows))
        both = np.diag(counts)
        either = counts.sum(0) + counts.sum(1) - both
        present = np.flatnonzero(either)
        iou = both[present] / either[present]
        lines = [
            [class_name(images.class_names, c), f"{one:.3f}", f"{2 * one / (1 + one):.3f}"]
            for c, one in zip(present.tolist(), iou.tolist(), strict=True)
        ]
        text = "\n".join(table(("class", "IoU", "Dice"), lines, right=(1, 2)))
        pictures = {}
        if drawn:
            titles = [""] * len(drawn)
            pictures["masks"] = drawing.gallery(drawn, titles, title="image, label, guess")
        return Scored({}, text, pictures, self._notes(float(iou.mean()) if len(iou) else 0.0))

    def _notes(self, iou: float) -> tuple[str, ...]:
        if not self.params.baselines:
            return ()
        others = ", ".join(f"{name} {value:.3f}" for name, value in self.params.baselines.items())
        return (f"mean IoU {iou:.4f}; {others}",)


def side_by_side(image: Image, labels: np.ndarray, guess: np.ndarray) -> Image:
    """Returns an image, its labels and a guess in one row; every class has a colour.

    Shapes:
      image: [height, width, 1 or 3] uint8; labels, guess: [height, width] int
      returns: [height, 3 * width + 2, 3] uint8; pixels that do not count are grey
    """
    rgb = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
    white = np.full((len(rgb), 1, 3), 255, np.uint8)
    return np.concatenate([rgb, white, coloured(labels), white, coloured(guess)], axis=1)


def coloured(labels: np.ndarray) -> Image:
    """Returns an image of classes: 0 is black, and the bits of a class are spread over colours.

    Shapes:
      labels: [height, width] int
      returns: [height, width, 3] uint8

    Source: the colours of the PASCAL VOC development kit.
    """
    rest, found = np.maximum(labels, 0), np.zeros((*labels.shape, 3), np.int64)
    for shift in range(7, -1, -1):
        for channel in range(3):
            found[..., channel] |= ((rest >> channel) & 1) << shift
        rest = rest >> 3
    found[labels == NOT_COUNTED] = 128 + 64
    return found.astype(np.uint8)


def mask_png(labels: np.ndarray, *, size: tuple[int, int] | None = None) -> bytes:
    """Returns a PNG whose values are classes, with the colours of `coloured` as its palette.

    Args:
      labels: the class of every pixel, up to 255.
      size: height and width of the PNG, without interpolation; None: those of the labels.

    Shapes:
      labels: [height, width] int
    """
    from PIL import Image as Pillow

    mask = Pillow.fromarray(labels.astype(np.uint8))
    if size is not None:
        mask = mask.resize(size[::-1], Pillow.Resampling.NEAREST)
    mask.putpalette(coloured(np.arange(256)[None]).tobytes())
    file = io.BytesIO()
    mask.save(file, format="PNG")
    return file.getvalue()
