"""Mixtures of two images and their labels: mixup and CutMix.

The second image is another training example, drawn by (seed, epoch, index) like the augmentation.
It is not another example of the batch, which a process might not have.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tekso.framework.params import Configurable, param


class Mix(Configurable):
    """Base class of mixtures.

    Raises:
      ValueError: alpha is not positive.
    """

    class Params(Configurable.Params):
        """Params of Mix."""

        alpha: float = param("The share of the first image is drawn from Beta(alpha, alpha).",
                             default=1.0)  # fmt: skip

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.alpha <= 0.0:
            raise ValueError(
                f"{self.params.path_of('alpha')} is {self.params.alpha}, but must be positive"
            )

    def mixed(
        self, x: np.ndarray, other: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """Returns the mixture of two images, and the share of the first one's label.

        Shapes:
          x, other, returns: [size, size, channels] float32
        """
        raise NotImplementedError(f"{type(self).__name__} has no mixed(x, other, random)")


class Mixup(Mix):
    """Adds two images with weights that sum to 1.

    Source:
      Zhang et al. 2018, "mixup: beyond empirical risk minimization", section 2.
    """

    class Params(Mix.Params):
        """Params of Mixup."""

        alpha: float = param(
            "The weight of the first image is drawn from Beta(alpha, alpha).", default=0.2
        )

    def mixed(
        self, x: np.ndarray, other: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """See `Mix`."""
        share = float(random.beta(self.params.alpha, self.params.alpha))
        return other + np.float32(share) * (x - other), share


class CutMix(Mix):
    """Replaces a random rectangle of an image by that of another; labels count by area.

    Source:
      Yun et al. 2019, "CutMix", section 3.1.
    """

    class Params(Mix.Params):
        """Params of CutMix."""

    def mixed(
        self, x: np.ndarray, other: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """See `Mix`."""
        height, width = x.shape[:2]
        side = math.sqrt(1.0 - float(random.beta(self.params.alpha, self.params.alpha)))
        rows = _interval(random.integers(height), round(side * height), height)
        columns = _interval(random.integers(width), round(side * width), width)
        mixed = np.array(x)
        mixed[rows, columns] = other[rows, columns]
        replaced = (rows.stop - rows.start) * (columns.stop - columns.start)
        return mixed, 1.0 - replaced / (height * width)


def _interval(centre: Any, length: int, size: int) -> slice:
    begin = int(centre) - length // 2
    return slice(max(begin, 0), min(begin + length, size))
