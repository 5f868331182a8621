"""Pictures of filters: the kernels of the first convolution of a model of images."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.task import Program
from tekso.framework.theta import Theta, flatten
from tekso.tasks.image.drawing import as_png

_MOST_SHOWN = 256
_SIDE = 48  # pixels of a drawn filter
_GREY = 128


class FirstFilters:
    """Draws the kernels of the first convolution of a layer, if it reads images.

    Args:
      layer: the layer, such as a task.
    """

    def __init__(self, layer: Layer) -> None:
        kernels = [(path, one) for path, one in layer.specs().items() if len(one.shape) == 4]
        path, shape = (kernels[0][0], kernels[0][1].shape) if kernels else ("", ())
        self.path = path if shape and shape[2] in (1, 3) and max(shape[:2]) > 1 else ""
        """Path of the kernels; empty: there are none."""

    def draw(self, program: Program) -> bytes:
        """Returns a PNG; b"" if there is nothing to draw.

        Args:
          program: calls functions with the weights.
        """
        return grid(np.asarray(program.call(self._kernel), np.float32)) if self.path else b""

    def _kernel(self, theta: Theta, ctx: StepContext) -> tf.Tensor:
        del ctx
        return tf.cast(flatten(theta)[self.path], tf.float32)


def grid(kernels: np.ndarray) -> bytes:
    """Returns a PNG of kernels side by side: grey is 0, the largest weight of each 0 or 255.

    Shapes:
      kernels: [height, width, 1 or 3, number]
    """
    height, width, channels, count = kernels.shape
    count = min(count, _MOST_SHOWN)
    columns = math.ceil(math.sqrt(count))
    factor = max(_SIDE // max(height, width), 1)
    gap = 2
    rows = math.ceil(count / columns)
    high, wide = height * factor + gap, width * factor + gap
    canvas = np.full([rows * high + gap, columns * wide + gap, channels], 255, np.uint8)
    for place in range(count):
        row, column = divmod(place, columns)
        one = kernels[..., place]
        largest = float(np.abs(one).max())
        values = np.nan_to_num(one / largest) if largest > 0 else np.zeros_like(one)
        pixels = np.clip(np.round(_GREY + values * 127.5), 0, 255).astype(np.uint8)
        top, left = gap + row * high, gap + column * wide
        drawn = pixels.repeat(factor, 0).repeat(factor, 1)
        canvas[top : top + high - gap, left : left + wide - gap] = drawn
    return as_png(canvas)
