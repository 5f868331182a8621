"""An input of images with boxes: reads, decodes, augments and normalises them on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Input, Signature
from tekso.framework.input.skips import BadRecordError
from tekso.framework.params import REQUIRED, param
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.detection.sources import BoxSource, Objects
from tekso.tasks.detection.steps import Boxed, BoxStep
from tekso.tasks.image.image_input import ImageInput
from tekso.tasks.image.preparation import Preparation
from tekso.tasks.image.steps import Image, fitted

BOXES, BOX_WEIGHTS = "boxes", "box_weights"


class BoxImages(ImageInput):
    """Images of one size with the boxes of their objects.

    In training, an image goes through the steps `augment`, together with its boxes. It is then
    resized to image_size × image_size, without keeping its aspect ratio. The random numbers of an
    example are a function of (seed, epoch, index). In an evaluation an image is only resized.

    A malformed image is replaced as in `ImageInput`, without boxes.

    Shapes:
      batch:
        "x": [batch, image_size, image_size, channels] float32, (value / 255 - mean) / deviation
        "boxes": [batch, max_boxes, 4] float32, [y_min, x_min, y_max, x_max] in shares of the image
        "labels": [batch, max_boxes] int32, from 1; 0 for padding
        "box_weights": [batch, max_boxes] float32; 0 for padding and crowds, otherwise 1
        "weights": [batch] float32; 0 for padding and malformed images
    Raises:
      InputError: as the source; the training images have changed since the run began.
      ValueError: a number is out of range.
    """

    class Params(ImageInput.Params):
        """Params of BoxImages."""

        source: BoxSource.Params = param("Where images and boxes come from.", default=REQUIRED)
        max_boxes: int = param(
            "Boxes of an image in a batch; further ones are left out: crowds first, then the "
            "smallest.",
            default=100,
        )
        augment: list[BoxStep.Params] = param("Steps of training, in their order.", default=[])

    source: BoxSource

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        p = self.params
        if p.max_boxes < 1:
            raise ValueError(f"{p.path_of('max_boxes')} is {p.max_boxes}, but must be at least 1")
        self.preparation = Preparation(p)
        steps = p.augment if self.is_training else []
        self._steps: list[BoxStep] = [step.instantiate() for step in steps]

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows, size, boxes = params.batch_size, params.image_size, params.max_boxes
        floats = np.dtype(np.float32)
        return {
            X: ((rows, size, size, params.channels), floats),
            BOXES: ((rows, boxes, 4), floats),
            LABELS: ((rows, boxes), np.dtype(np.int32)),
            BOX_WEIGHTS: ((rows, boxes), floats),
            WEIGHTS: ((rows,), floats),
        }

    def prepared(self, index: int, key: int) -> Batch:
        """Returns an example; see the class and `PreparedInput`."""
        objects = self.source.objects(index)
        image = self.pixels(index)
        scale = np.array([*objects.size, *objects.size], np.float64)
        boxes = np.clip(objects.boxes / scale, 0.0, 1.0)
        weights = 1.0 - objects.is_crowd.astype(np.float32)
        example = Boxed(image, boxes, objects.labels, weights)
        if self._steps:
            random = np.random.Generator(np.random.Philox(key=key))
            for step in self._steps:
                example = step.apply(example, self.params.image_size, random)
        return self._padded(example)

    def pixels(self, index: int) -> Image:
        """Returns the pixels of an image in their size, [height, width, channels] uint8.

        Raises:
          BadRecordError: the image is malformed, or has another size than its annotation says.
        """
        origin, objects = self.source.origin(index), self.source.objects(index)
        image = self.preparation.pixels(self.source.image(index), origin)
        if image.shape[:2] != objects.size:
            (height, width), (h, w) = image.shape[:2], objects.size
            raise BadRecordError(
                origin, f"the image has {width} × {height} pixels, its annotation says {w} × {h}"
            )
        return image

    def _padded(self, example: Boxed) -> Batch:
        most = self.params.max_boxes
        areas = np.prod(example.boxes[:, 2:] - example.boxes[:, :2], axis=1)
        kept = np.sort(np.lexsort((-areas, -example.weights))[:most])
        batch = self.blank()
        batch[X] = self.preparation.normalized(fitted(example.image, self.params.image_size))
        batch[BOXES][: len(kept)] = example.boxes[kept]
        batch[LABELS][: len(kept)] = example.labels[kept]
        batch[BOX_WEIGHTS][: len(kept)] = example.weights[kept]
        batch[WEIGHTS] = np.ones((), np.float32)
        return batch


def objects_of(images: BoxImages, step: int) -> list[Objects]:
    """Returns the objects of the images of a batch of a pass; those of padding are left out."""
    size = images.params.batch_size
    rows = range(step * size, min((step + 1) * size, images.num_examples))
    return [images.source.objects(index) for index in rows]


def boxes_of(input: Input) -> BoxImages:
    """Returns the input of boxes of an input, which may be a `HeldOut`.

    Raises:
      InputError: it reads no boxes.
    """
    inner = input.inner
    if not isinstance(inner, BoxImages):
        raise InputError(f"{type(inner).__name__} reads no boxes: use BoxImages as the input")
    return inner
