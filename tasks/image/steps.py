"""Steps that prepare an image: crops, flips and resizing.

A step is a pure function of an image and a generator of random numbers. An input makes a generator
for each example from (seed, epoch, index), so that an image does not depend on the batch, on the
process that builds it, or on restarts.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np

from tekso.framework.params import Configurable, param

Image = np.ndarray
"""Pixels, [height, width, channels] uint8, with 1 or 3 channels."""

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels."""


class ImageStep(Configurable):
    """Base class of the steps; a subclass defines `apply`.

    Attributes:
      moves_pixels: whether a pixel may get another place, so that boxes and masks would not fit.
    """

    class Params(Configurable.Params):
        """Params of ImageStep."""

    moves_pixels: ClassVar[bool] = True

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """Returns the changed image.

        Args:
          image: the image; it must not be changed in place.
          size: height and width of the images of a batch.
          random: draws the random numbers of the example.

        Shapes:
          image: [height, width, channels] uint8
          returns: [any height, any width, channels] uint8
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply(image, size, random)")


class CentreCrop(ImageStep):
    """Cuts out a square at the centre and resizes it.

    Raises:
      ValueError: the fraction is not in (0, 1].
    """

    class Params(ImageStep.Params):
        """Params of CentreCrop."""

        fraction: float = param("Side of the square, in shorter sides of the image.", default=0.875)
        interpolation: Interpolation = param("How to resize.", default="bicubic")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not 0.0 < self.params.fraction <= 1.0:
            raise ValueError(
                f"{self.params.path_of('fraction')} is {self.params.fraction}, but must be above 0 "
                "and at most 1"
            )

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        del random
        height, width = image.shape[:2]
        side = self.params.fraction * min(height, width)
        box = _box((width - side) / 2, (height - side) / 2, side, side)
        return resized(image, size, self.params.interpolation, box=box)


class InceptionCrop(ImageStep):
    """Cuts out a random rectangle of a random area and aspect ratio, and resizes it.

    The logarithm of the aspect ratio is uniform. If no rectangle fits in ten attempts, it is the
    largest central one with an allowed ratio.

    Raises:
      ValueError: a range is empty or not positive; an area is above 1.
    Source:
      Szegedy et al. 2015, "Going deeper with convolutions", section 6.
    """

    class Params(ImageStep.Params):
        """Params of InceptionCrop."""

        least_area: float = param("Least area, as a fraction of the image.", default=0.08)
        most_area: float = param("Largest area, as a fraction of the image.", default=1.0)
        least_aspect: float = param("Least width / height.", default=0.75)
        most_aspect: float = param("Largest width / height.", default=4 / 3)
        interpolation: Interpolation = param("How to resize.", default="bicubic")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not (0 < p.least_area <= p.most_area <= 1 and 0 < p.least_aspect <= p.most_aspect):
            raise ValueError(
                f"{p.path_of('least_area')}: areas {p.least_area} to {p.most_area} and aspects "
                f"{p.least_aspect} to {p.most_aspect} must be positive, ascending, and areas at "
                "most 1"
            )

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        return resized(image, size, self.params.interpolation, box=self._drawn(image, random))

    def _drawn(self, image: Image, random: np.random.Generator) -> Box:
        p = self.params
        height, width = image.shape[:2]
        for _ in range(10):
            area = random.uniform(p.least_area, p.most_area) * height * width
            aspect = math.exp(random.uniform(math.log(p.least_aspect), math.log(p.most_aspect)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left, top = random.integers(width - w + 1), random.integers(height - h + 1)
                return _box(float(left), float(top), w, h)
        aspect = min(max(width / height, p.least_aspect), p.most_aspect)
        w = min(float(width), height * aspect)
        h = min(float(height), width / aspect)
        return _box((width - w) / 2, (height - h) / 2, w, h)


class Flip(ImageStep):
    """Mirrors an image at random."""

    class Params(ImageStep.Params):
        """Params of Flip."""

        probability: float = param("Probability of a mirrored image.", default=0.5)
        direction: Literal["horizontal", "vertical"] = param(
            "Whether left and right are exchanged, or top and bottom.", default="horizontal"
        )

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        del size
        if random.random() >= self.params.probability:
            return image
        return image[:, ::-1] if self.params.direction == "horizontal" else image[::-1]


class PadAndCrop(ImageStep):
    """Pads an image on all sides, and cuts out a random square of the original size.

    An image of another size is resized before.

    Source:
      He et al. 2016, "Deep residual learning", section 4.2: padding of 4 for 32 × 32 pixels.
    """

    class Params(ImageStep.Params):
        """Params of PadAndCrop."""

        padding: int = param("Pixels added on each side.", default=4)
        value: int = param("Value of the added pixels, 0 to 255.", default=0)

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        p = self.params
        image = fitted(image, size)
        top, left = random.integers(2 * p.padding + 1, size=2)
        side = size + 2 * p.padding
        padded = np.full((side, side, image.shape[2]), p.value, np.uint8)
        padded[p.padding : p.padding + size, p.padding : p.padding + size] = image
        return padded[top : top + size, left : left + size]


class RandomErasing(ImageStep):
    """Fills a random rectangle with random pixels, or with one value.

    An image of another size is resized before.

    Source:
      Zhong et al. 2020, "Random erasing data augmentation", algorithm 1.
    """

    class Params(ImageStep.Params):
        """Params of RandomErasing."""

        probability: float = param("Probability that a rectangle is erased.", default=0.25)
        least_area: float = param("Least area, as a fraction of the image.", default=0.02)
        most_area: float = param("Largest area, as a fraction of the image.", default=1 / 3)
        least_aspect: float = param("Least width / height; the largest is 1 / this.", default=0.3)
        value: int | None = param("The value to fill with; None: random pixels.", default=None)

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        p = self.params
        if random.random() >= p.probability:
            return image
        image = np.array(fitted(image, size))
        most = -math.log(p.least_aspect)
        for _ in range(10):
            area = random.uniform(p.least_area, p.most_area) * size * size
            aspect = math.exp(random.uniform(-most, most))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w < size and 0 < h < size:
                left, top = random.integers(size - w + 1), random.integers(size - h + 1)
                fill: Any = p.value
                if fill is None:
                    fill = random.integers(256, size=(h, w, image.shape[2]), dtype=np.uint8)
                image[top : top + h, left : left + w] = fill
                break
        return image


def fitted(image: Image, size: int) -> Image:
    """Returns an image of size × size pixels; resizes it without keeping its aspect ratio."""
    if image.shape[:2] == (size, size):
        return image
    return resized(image, size, "bilinear")


def resized(
    image: Image, size: int, interpolation: Interpolation, *, box: Box | None = None
) -> Image:
    """Returns a part of an image, resized to size × size pixels, with antialiasing.

    Shapes:
      image: [height, width, channels] uint8
      returns: [size, size, channels] uint8
    """
    from PIL import Image as Pillow

    kind = Pillow.Resampling[interpolation.upper()]
    found = np.asarray(as_pillow(image).resize((size, size), kind, box=box))
    return found.reshape(size, size, image.shape[2])


def as_pillow(image: Image) -> Any:
    """Returns an image as Pillow's."""
    from PIL import Image as Pillow

    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    return Pillow.fromarray(np.ascontiguousarray(pixels))


def _box(left: float, top: float, width: float, height: float) -> Box:
    return left, top, left + width, top + height
