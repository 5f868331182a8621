"""Several crops of every image in an evaluation: the mean of their probabilities is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program
from tekso.tasks.classification.task import ACCURACY
from tekso.tasks.image.input import images_of
from tekso.tasks.image.steps import Image, Interpolation, resized

PROBABILITIES, TOP_5 = "probabilities", "top_5_accuracy"
CROPS = "crops"

Place = Literal["centre", "top_left", "top_right", "bottom_left", "bottom_right"]

_SHARES: dict[Place, tuple[float, float]] = {
    "centre": (0.5, 0.5),
    "top_left": (0.0, 0.0),
    "top_right": (0.0, 1.0),
    "bottom_left": (1.0, 0.0),
    "bottom_right": (1.0, 1.0),
}
"""{place: the shares of the room that are above and to the left of the crop}."""


class Crops(Configurable):
    """Classifies several squares of every image, and counts the mean of their probabilities.

    The default is ten crops: the centre and the four corners, and their mirror images. They are
    taken from the whole image, instead of the steps `input.evaluate`. Every image counts once.

    Reports "crops/accuracy", and "crops/top_5_accuracy" if there are more than 5 classes.

    Raises:
      ValueError: the fraction is not in (0, 1], or there are no places.

    Source: Krizhevsky et al. 2012, "ImageNet classification with deep convolutional neural
      networks", section 4.1.
    """

    class Params(Configurable.Params):
        """Params of Crops."""

        fraction: float = param("Side of a crop, in shorter sides of the image.", default=0.875)
        places: list[Place] = param("Where the crops are.", default=list(_SHARES))
        mirrors: Literal["none", "horizontal"] = param(
            "Whether every crop is also mirrored.", default="horizontal"
        )
        interpolation: Interpolation = param("How to resize.", default="bicubic")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not 0.0 < p.fraction <= 1.0 or not p.places:
            raise ValueError(
                f"{p.path_of('fraction')} is {p.fraction} and places is {list(p.places)}, but must "
                "be above 0 and at most 1, and name at least one place"
            )

    def of(self, image: Image, size: int) -> np.ndarray:
        """Returns the crops of an image.

        Shapes:
          image: [height, width, channels] uint8
          returns: [crops, size, size, channels] uint8
        """
        p = self.params
        height, width = image.shape[:2]
        side = p.fraction * min(height, width)
        found = []
        for place in p.places:
            down, right = _SHARES[place]
            top, left = down * (height - side), right * (width - side)
            box = (left, top, left + side, top + side)
            found.append(resized(image, size, p.interpolation, box=box))
        crops = np.stack(found)
        return np.concatenate([crops, crops[:, :, ::-1]]) if p.mirrors == "horizontal" else crops

    def figures(
        self,
        program: Program,
        answer: Callable[..., Mapping[str, Any]],
        input: Input,
        *,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Returns the metrics of an evaluation input; None if stopped early.

        Args:
          program: calls functions with the weights.
          answer: function(theta, x, ctx) that returns the "probabilities" of the classes.
          input: an evaluation input of images.
          stopped: returns whether to stop early.
        """
        images = images_of(input)
        p = images.params
        hits = top_5 = total = num_classes = 0
        for begin in range(0, images.num_examples, p.batch_size):
            if stopped():
                return None
            index = range(begin, min(begin + p.batch_size, images.num_examples))
            labels, x = self._read(images, list(index))
            if not len(labels):
                continue
            mean: np.ndarray = np.zeros([len(labels), 1])
            for one in np.moveaxis(x, 1, 0):
                padded = np.zeros([p.batch_size, *one.shape[1:]], np.float32)
                padded[: len(one)] = one
                probabilities = np.asarray(program.call(answer, padded)[PROBABILITIES], np.float64)
                mean = mean + probabilities[: len(one)] / x.shape[1]
            own = np.take_along_axis(mean, labels[:, None], 1)
            # Equal ones count against the label, and so do those that are not numbers.
            ranks = mean.shape[1] - 1 - (mean < own).sum(1)
            hits += int((ranks == 0).sum())
            top_5 += int((ranks < 5).sum())
            total, num_classes = total + len(labels), mean.shape[1]
        found = {f"{CROPS}/{ACCURACY}": hits / max(total, 1)}
        if num_classes > 5:
            found[f"{CROPS}/{TOP_5}"] = top_5 / max(total, 1)
        return found

    def _read(self, images: Any, index: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of well-formed images, and their crops as the model gets them.

        Shapes:
          returns: [n] int64, [n, crops, image_size, image_size, channels] float32
        """
        labels, found = [], []
        for i in index:
            try:
                record = images.source[i]
                pixels = images.preparation.pixels(record.image, images.source.origin(i))
            except BadRecordError:  # the evaluation has reported it
                continue
            labels.append(record.label)
            crops = self.of(pixels, images.params.image_size)
            found.append(images.preparation.normalized(crops))
        return np.array(labels, np.int64), np.stack(found) if found else np.zeros(0)
