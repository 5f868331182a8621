"""An input of images with masks: reads, decodes, augments and normalises them on the host."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Input, Signature
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.params import REQUIRED, param
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.image_input import ImageInput
from tekso.tasks.image.preparation import Preparation, pixels_of
from tekso.tasks.image.steps import Image, ImageStep, fitted, resized
from tekso.tasks.segmentation.sources import IGNORED, MaskSource, decode_mask

NOT_COUNTED = -1
"""Label of the pixels that do not count."""
_LOOKED_AT = 8  # masks


class MaskImages(ImageInput):
    """Images of one size with the class of every pixel.

    In training, an image goes through the steps `augment`; in an evaluation (order "once"),
    through the steps `evaluate`. A step that moves pixels changes the mask in the same way, without
    interpolation. Both are then resized to image_size × image_size, without keeping the aspect
    ratio. The random numbers of an example are a function of (seed, epoch, index).

    An image is replaced as in `ImageInput` also if its mask is malformed or has an unknown class.

    Shapes:
      batch:
        "x": [batch, image_size, image_size, channels] float32, (value / 255 - mean) / deviation
        "labels": [batch, image_size, image_size] int32; -1 for pixels that do not count
        "weights": [batch] float32; 0 for padding and malformed images
    Raises:
      InputError: as the source; the training images have changed since the run began.
      ValueError: a number is out of range, or a step cannot be applied to masks.
    """

    class Params(ImageInput.Params):
        """Params of MaskImages."""

        source: MaskSource.Params = param("Where images and masks come from.", default=REQUIRED)
        augment: list[ImageStep.Params] = param("Steps of training, in their order.", default=[])
        evaluate: list[ImageStep.Params] = param("Steps of an evaluation.", default=[])

    source: MaskSource

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        p = self.params
        self.preparation = Preparation(p)
        steps = [step.instantiate() for step in (p.augment if self.is_training else p.evaluate)]
        self._steps: list[tuple[ImageStep, ImageStep | None]] = [
            (step, step.for_masks(fill=IGNORED) if step.moves_pixels else None) for step in steps
        ]

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows, size = params.batch_size, params.image_size
        return {
            X: ((rows, size, size, params.channels), np.dtype(np.float32)),
            LABELS: ((rows, size, size), np.dtype(np.int32)),
            WEIGHTS: ((rows,), np.dtype(np.float32)),
        }

    def prepared(self, index: int, key: int) -> Batch:
        """Returns an example; see the class and `PreparedInput`."""
        size, origin, record = self.params.image_size, self.source.origin(index), self.source[index]
        image = self.preparation.pixels(record.image, origin)
        mask: Image = self._checked(decode_mask(record.mask, origin), origin)[:, :, None]
        if image.shape[:2] != mask.shape[:2]:
            raise BadRecordError(
                origin,
                f"the image has {image.shape[1]} × {image.shape[0]} pixels, its mask "
                f"{mask.shape[1]} × {mask.shape[0]}",
            )
        random = np.random.Generator(np.random.Philox(key=key))
        for step, of_mask in self._steps:
            same = copy.deepcopy(random)
            image = step.apply(image, size, random)
            if of_mask is not None:
                mask = of_mask.apply(mask, size, same)
        mask = mask if mask.shape[:2] == (size, size) else resized(mask, size, "nearest")
        labels = np.where(mask[:, :, 0] == IGNORED, NOT_COUNTED, mask[:, :, 0].astype(np.int32))
        x = self.preparation.normalized(fitted(image, size))
        return {X: x, LABELS: labels, WEIGHTS: np.ones((), np.float32)}

    def _checked(self, mask: np.ndarray, origin: Origin) -> np.ndarray:
        classes = self.num_classes or IGNORED
        largest = int(mask.max(where=mask != IGNORED, initial=0))
        if largest >= classes:
            raise BadRecordError(
                origin,
                f"its mask has the value {largest}, but the source has {classes} classes: values "
                f"must be 0 to {classes - 1}, or {IGNORED} for pixels that do not count",
            )
        return mask

    def drawn(self, x: np.ndarray) -> Image:
        """Returns the pixels of an image of a batch, for pictures."""
        return pixels_of(x, self.params)

    def section(self, labels: np.ndarray) -> np.ndarray:
        """Returns the labels that belong to what `drawn` shows, [height, width]."""
        return labels

    def has_background_only(self) -> bool:
        """Returns whether the first masks have no values but 0 and `IGNORED`, and some of these."""
        seen = np.zeros(256, bool)
        for index in range(min(_LOOKED_AT, self.num_examples)):
            with contextlib.suppress(BadRecordError):
                mask = decode_mask(self.source[index].mask, self.source.origin(index))
                seen |= np.bincount(mask.ravel(), minlength=256) > 0
        return bool(seen[IGNORED]) and not seen[1:IGNORED].any()


def masks_of(input: Input) -> MaskImages:
    """Returns the input of masks of an input, which may be a `HeldOut`.

    Raises:
      InputError: it reads no masks.
    """
    inner = input.inner
    if not isinstance(inner, MaskImages):
        raise InputError(f"{type(inner).__name__} reads no masks: use MaskImages as the input")
    return inner
