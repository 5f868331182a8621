"""Scenes of handwritten digits with a mask, composed of the digits in scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.image.packaged import Digits
from tekso.tasks.image.sources import IMAGES
from tekso.tasks.segmentation.sources import MASKS, MaskArrays

_INK = 64  # a pixel of at least this value, of 255, belongs to the digit
_NOISE = 90  # largest value of the background


class DigitScenes(MaskArrays):
    """Grey images with digits at random places, in front of noise; 11 classes.

    A digit has its own size of 8 × 8 pixels or twice that. Class 0 is the background, and class
    1 + d the pixels with ink of a digit d. A later digit covers earlier ones where it has ink. The
    scenes of dev have the digits that are held out, which other people wrote (see `Digits`).

    Raises:
      InputError: scikit-learn is not installed; or there is no such split.
    """

    class Params(MaskArrays.Params):
        """Params of DigitScenes."""

        side: int = param("Height and width of a scene.", default=48)
        num_digits: int = param("Digits of a scene.", default=5)
        num_train: int = param("Scenes for training.", default=2000)
        num_held_out: int = param("Scenes for dev.", default=300)

    class_names = ("background", *(f"digit {d}" for d in range(10)))

    def load(self, split: Split) -> Mapping[str, Any]:
        """See `MaskArrays`."""
        p = self.params
        if min(p.side - 16, p.num_digits, p.num_train, p.num_held_out) < 1:
            raise ValueError(
                f"{p.path_of('side')} is {p.side}, but must be above 16; num_digits "
                f"{p.num_digits}, num_train {p.num_train} and num_held_out {p.num_held_out} must "
                "be at least 1"
            )
        digits = Digits.Params().instantiate(split=split)
        count = p.num_train if split == "train" else p.num_held_out
        random = np.random.default_rng(0 if split == "train" else 1)
        shape = (count, p.side, p.side)
        images = random.integers(_NOISE, size=shape, dtype=np.uint8)
        masks = np.zeros(shape, np.uint8)
        for image, mask in zip(images, masks, strict=True):
            for index in random.integers(len(digits), size=p.num_digits):
                factor = int(random.integers(1, 3))
                ink = digits.images[index, :, :, 0].repeat(factor, 0).repeat(factor, 1)
                top, left = random.integers(p.side - len(ink) + 1, size=2)
                place = (slice(top, top + len(ink)), slice(left, left + len(ink)))
                image[place] = np.maximum(image[place], ink)
                mask[place][ink >= _INK] = 1 + digits.labels[index]
        return {IMAGES: images, MASKS: masks}

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return "scenes of scikit-learn's digits"
