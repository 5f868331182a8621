"""An input of labelled images: reads, decodes, augments and normalises them on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Input, Signature
from tekso.framework.input.skips import BadRecordError
from tekso.framework.params import REQUIRED, param
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.image_input import ImageInput
from tekso.tasks.image.mixing import Mix
from tekso.tasks.image.preparation import Preparation
from tekso.tasks.image.sources import ImageSource
from tekso.tasks.image.steps import ImageStep

OTHER_LABELS, SHARES = "other_labels", "shares"


class Images(ImageInput):
    """Labelled images of one size.

    In training, every image goes through the steps `augment`; in an evaluation (order "once")
    through the steps `evaluate`. An image that then is not image_size × image_size is resized,
    without keeping its aspect ratio. The random numbers of an example are a function of (seed,
    epoch, index). Image files are decoded in several threads.

    Shapes:
      batch:
        "x": [batch, image_size, image_size, channels] float32, (value / 255 - mean) / deviation
        "labels": [batch] int32
        "weights": [batch] float32; 0 for padding and malformed images, otherwise 1 or that of the
          source
        only if `mix` is not empty: "other_labels" [batch] int32, and "shares" [batch] float32, the
          share of "labels" in the target; the rest is that of "other_labels"
    Raises:
      InputError: as the source; the training images have changed since the run began.
      ValueError: a number is out of range.
    """

    class Params(ImageInput.Params):
        """Params of Images."""

        source: ImageSource.Params = param("Where the images come from.", default=REQUIRED)
        augment: list[ImageStep.Params] = param("Steps of training, in their order.", default=[])
        evaluate: list[ImageStep.Params] = param("Steps of an evaluation.", default=[])
        mix: list[Mix.Params] = param(
            "Mixtures with another image in training; each example uses one of them, drawn "
            "uniformly. Empty: no mixtures.",
            default=[],
        )

    source: ImageSource

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        p = self.params
        self.preparation = Preparation(p, p.augment if self.is_training else p.evaluate)
        self._mix: list[Mix] = [mix.instantiate() for mix in p.mix] if self.is_training else []
        if self._mix and self.source.has_weights:
            raise InputError(
                f"{p.path_of('mix')} is set, but {self.source.describe()} gives the images "
                "weights: images with different weights are not mixed. Set it to [], or leave out "
                "the array 'weights'"
            )

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows, size = params.batch_size, params.image_size
        integers, floats = np.dtype(np.int32), np.dtype(np.float32)
        found: Signature = {
            X: ((rows, size, size, params.channels), floats),
            LABELS: ((rows,), integers),
            WEIGHTS: ((rows,), floats),
        }
        if params.mix:
            found |= {OTHER_LABELS: ((rows,), integers), SHARES: ((rows,), floats)}
        return found

    def prepared(self, index: int, key: int) -> Batch:
        """Returns an example; see the class and `PreparedInput`."""
        x, label, weight = self._pixels(index, key)
        example: dict[str, Any] = {X: x, LABELS: label, WEIGHTS: weight}
        if not self.params.mix:
            return example
        example |= {OTHER_LABELS: 0, SHARES: 1.0}
        if not self._mix:
            return example
        random = np.random.Generator(np.random.Philox(key=np.array([key, 1], np.uint64)))
        mix = self._mix[random.integers(len(self._mix))]
        count = self.num_examples
        other = (index + 1 + int(random.integers(max(count - 1, 1)))) % count
        try:
            second, other_label, _ = self._pixels(other, int(random.integers(1 << 63)))
        except BadRecordError:  # it is reported as an example of its own
            return {**example, OTHER_LABELS: label}
        x, share = mix.mixed(x, second, random)
        return {**example, X: x, OTHER_LABELS: other_label, SHARES: share}

    def blank(self) -> Batch:
        """See `PreparedInput`."""
        found = super().blank()
        return {**found, SHARES: np.ones((), np.float32)} if SHARES in found else found

    def _pixels(self, index: int, key: int) -> tuple[np.ndarray, int, float]:
        """Returns an image as the model gets it, its label and its weight.

        Raises:
          BadRecordError: the image is malformed.
        """
        record = self.source[index]
        image = self.preparation.image(record.image, key, self.source.origin(index))
        return self.preparation.normalized(image), record.label, record.weight


def images_of(input: Input) -> Images:
    """Returns the image input of an input, which may be a `HeldOut`.

    Raises:
      InputError: it reads no images.
    """
    inner = input.inner
    if not isinstance(inner, Images):
        raise InputError(f"{type(inner).__name__} reads no images: use Images as the input")
    return inner
