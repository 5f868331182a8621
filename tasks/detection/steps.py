"""Steps that augment an image together with the boxes of its objects.

A step is a pure function of an image with boxes and a generator of random numbers, which an input
makes for each example from (seed, epoch, index).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tekso.framework.params import Configurable, param
from tekso.tasks.image.colour import ColourJitter
from tekso.tasks.image.steps import Image, ImageStep

_TRIALS = 50
_ASPECT = 2.0  # largest ratio of the sides of a crop
_WHOLE, _FREE = None, -1.0


@dataclasses.dataclass(frozen=True)
class Boxed:
    """An image with boxes.

    Attributes:
      image: [height, width, channels] uint8.
      boxes: [n, 4], [y_min, x_min, y_max, x_max] in shares of the image, from 0 to 1.
      labels: [n] int32.
      weights: [n] float32, 0 for boxes that are not trained on.
    """

    image: Image
    boxes: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


class BoxStep(Configurable):
    """Base class of the steps; a subclass defines `apply`."""

    class Params(Configurable.Params):
        """Params of BoxStep."""

    def apply(self, example: Boxed, size: int, random: np.random.Generator) -> Boxed:
        """Returns the changed image with its boxes.

        Args:
          example: image and boxes; the arrays must not be changed in place.
          size: height and width of the images of a batch.
          random: draws the random numbers of the example.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply(example, size, random)")


class SsdCrop(BoxStep):
    """Cuts out a random part of the image that overlaps every object enough, as SSD does.

    The least overlap (intersection over union of the part and each box) is drawn from 0.1, 0.3,
    0.5, 0.7, 0.9, "any" and "the whole image". The sides of the part are uniform in 0.3 to 1 of the
    image, and their ratio is at most 2. If 50 parts fail, the least overlap is drawn again. A box
    stays if its centre is in the part, and is cut at the border; at least one object must stay.
    Boxes of weight 0, such as crowds, are no objects; an image without any is not cut.

    Source:
      Liu et al. 2016, section 2.2, "data augmentation"; sides and trials as in MLPerf 0.6.
    """

    class Params(BoxStep.Params):
        """Params of SsdCrop."""

        least_side: float = param("Least height and width of a part, in shares.", default=0.3)
        least_overlaps: list[float] = param(
            "Least overlaps to draw from, besides 'any' and 'the whole image'.",
            default=[0.1, 0.3, 0.5, 0.7, 0.9],
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not 0.0 < p.least_side <= 1.0 or not all(0.0 <= x < 1.0 for x in p.least_overlaps):
            raise ValueError(
                f"{p.path_of('least_side')} is {p.least_side} and least_overlaps is "
                f"{list(p.least_overlaps)}, but must be in (0, 1] and in [0, 1)"
            )
        self._modes = [_WHOLE, *p.least_overlaps, _FREE]

    def apply(self, example: Boxed, size: int, random: np.random.Generator) -> Boxed:
        """See `BoxStep`."""
        del size
        objects = example.boxes[example.weights > 0]
        if not len(objects):
            return example
        while True:
            least = self._modes[random.integers(len(self._modes))]
            if least is _WHOLE:
                return example
            for _ in range(_TRIALS):
                part = self._part(example.image, random)
                if part is None or np.min(_overlaps(part, example.image, objects)) <= least:
                    continue
                found = cropped(example, part)
                if found.weights.any():
                    return found

    def _part(self, image: Image, random: np.random.Generator) -> tuple[int, int, int, int] | None:
        """Returns top, left, bottom and right of a part in pixels; None: it is too long."""
        height, width = image.shape[:2]
        h, w = random.uniform(self.params.least_side, 1.0, size=2)
        if max(h / w, w / h) > _ASPECT:
            return None
        rows, columns = max(1, round(h * height)), max(1, round(w * width))
        top = int(random.integers(height - rows + 1))
        left = int(random.integers(width - columns + 1))
        return top, left, top + rows, left + columns


class BoxFlip(BoxStep):
    """Mirrors an image and its boxes at random: exchanges left and right."""

    class Params(BoxStep.Params):
        """Params of BoxFlip."""

        probability: float = param("Probability of a mirrored image.", default=0.5)

    def apply(self, example: Boxed, size: int, random: np.random.Generator) -> Boxed:
        """See `BoxStep`."""
        del size
        if random.random() >= self.params.probability:
            return example
        y_min, x_min, y_max, x_max = np.moveaxis(example.boxes, -1, 0)
        boxes = np.stack([y_min, 1.0 - x_max, y_max, 1.0 - x_min], -1)
        return dataclasses.replace(example, image=example.image[:, ::-1], boxes=boxes)


class Recolour(BoxStep):
    """Applies a step of images that leaves every pixel at its place, by default SSD's colours.

    Raises:
      ValueError: the step may move pixels.
    """

    class Params(BoxStep.Params):
        """Params of Recolour."""

        step: ImageStep.Params = param(
            "The step.",
            default=ColourJitter.Params(brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05),
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._step: ImageStep = self.params.step.instantiate()
        if self._step.moves_pixels:
            raise ValueError(
                f"{self.params.path_of('step')} is {type(self._step).__name__}, which may move "
                "pixels, and the boxes would not follow: use a BoxStep such as SsdCrop or BoxFlip"
            )

    def apply(self, example: Boxed, size: int, random: np.random.Generator) -> Boxed:
        """See `BoxStep`."""
        return dataclasses.replace(example, image=self._step.apply(example.image, size, random))


def cropped(example: Boxed, part: tuple[int, int, int, int]) -> Boxed:
    """Returns a part of an image, with the boxes whose centres are in it, cut at its border.

    Args:
      example: image and boxes.
      part: top, left, bottom and right, in pixels.
    """
    top, left, bottom, right = part
    height, width = example.image.shape[:2]
    scale = np.array([height, width, height, width], np.float64)
    pixels = example.boxes * scale
    centres = (pixels[:, :2] + pixels[:, 2:]) / 2
    kept = np.all((centres > [top, left]) & (centres < [bottom, right]), axis=1)
    moved = np.clip(pixels[kept], [top, left] * 2, [bottom, right] * 2) - [top, left] * 2
    boxes = moved / np.array([bottom - top, right - left] * 2, np.float64)
    return Boxed(
        example.image[top:bottom, left:right],
        boxes,
        example.labels[kept],
        example.weights[kept],
    )


def _overlaps(part: tuple[int, int, int, int], image: Image, boxes: np.ndarray) -> np.ndarray:
    """Returns intersection over union of a part of an image, in pixels, with every box, [n]."""
    height, width = image.shape[:2]
    one = np.array(part, np.float64) / [height, width, height, width]
    low = np.maximum(boxes[:, :2], one[:2])
    high = np.minimum(boxes[:, 2:], one[2:])
    shared = np.prod(np.maximum(high - low, 0.0), axis=1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    found: np.ndarray = shared / (areas + np.prod(one[2:] - one[:2]) - shared)
    return found
