"""How an image becomes an input of the model: decoding, steps, resizing, normalisation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tekso.framework.input.skips import Origin
from tekso.tasks.image.decoding import decode
from tekso.tasks.image.steps import Image, ImageStep, fitted

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601-2


class Preparation:
    """Prepares images as the Params of an `ImageInput` say.

    Args:
      params: Params of an `ImageInput`.
      steps: Params of the steps, in their order.

    Raises:
      ValueError: a number in the Params is out of range.
    """

    def __init__(self, params: Any, steps: Iterable[Any] = ()) -> None:
        _check(params)
        self.params = params
        self._steps: list[ImageStep] = [step.instantiate() for step in steps]

    def image(self, image: bytes | Image, key: int, origin: Origin) -> Image:
        """Returns the pixels of an image after all steps.

        Args:
          image: the bytes of a file, or pixels.
          key: key of the random numbers of the steps.
          origin: position of the image, for errors.

        Shapes:
          image: if it has pixels, [height, width, 1 or 3] uint8
          returns: [image_size, image_size, channels] uint8

        Raises:
          BadRecordError: the file is malformed.
        """
        size, image = self.params.image_size, self.pixels(image, origin)
        if self._steps:
            random = np.random.Generator(np.random.Philox(key=key))
            for step in self._steps:
                image = step.apply(image, size, random)
        return fitted(image, size)

    def pixels(self, image: bytes | Image, origin: Origin) -> Image:
        """Returns the pixels of an image in their size, with the channels of the input.

        Shapes:
          image: if it has pixels, [height, width, 1 or 3] uint8
          returns: [height, width, channels] uint8

        Raises:
          BadRecordError: the file is malformed.
        """
        p = self.params
        if isinstance(image, bytes):
            return decode(image, channels=p.channels, background=p.background, origin=origin)
        return _with_channels(image, p.channels)

    def normalized(self, image: Image) -> np.ndarray:
        """Returns (value / 255 - mean) / deviation, float32 of the same shape."""
        scale, shift = scale_and_shift(self.params)
        found: np.ndarray = image.astype(np.float32) * scale + shift
        return found


def scale_and_shift(params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a pixel of 0 to 255 is multiplied by, and what is added, as the model gets it.

    Shapes:
      returns: two of [1] or [channels], float32
    """
    mean, deviation = (np.asarray(v, np.float32) for v in (params.mean, params.deviation))
    return np.float32(1 / 255) / deviation, -mean / deviation


def pixels_of(x: np.ndarray, params: Any) -> Image:
    """Returns the pixels of normalised images, uint8 of the same shape."""
    scale, shift = scale_and_shift(params)
    values: np.ndarray = (x - shift) / scale
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def _check(p: Any) -> None:
    if p.image_size < 1 or p.channels not in (1, 3):
        raise ValueError(
            f"{p.path_of('image_size')} is {p.image_size} and channels is {p.channels}, but must "
            "be at least 1, and 1 or 3"
        )
    for name in ("mean", "deviation"):
        if len(p.get(name)) not in (1, p.channels):
            raise ValueError(
                f"{p.path_of(name)} has {len(p.get(name))} numbers, but must have 1 or {p.channels}"
            )
    if min(p.deviation) <= 0.0:
        raise ValueError(f"{p.path_of('deviation')} is {p.deviation}, but must be positive")
    if not 0 <= p.background <= 255:
        raise ValueError(f"{p.path_of('background')} is {p.background}, but must be 0 to 255")


def _with_channels(image: Image, channels: int) -> Image:
    """Returns pixels in memory with another number of channels."""
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return np.round(image @ _LUMA).astype(np.uint8)[:, :, None]
