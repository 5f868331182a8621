"""Pooling of images, channels last: maximum, average, and average over the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.windows import Padding, Window
from tekso.framework.theta import Theta


class Pool2D(Layer):
    """Base of the poolings with a sliding window.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]; see `output_size`
    """

    class Params(Layer.Params):
        """Params of a pooling."""

        window_shape: tuple[int, int] = param("Height and width of the window.", default=(2, 2))
        strides: tuple[int, int] = param("Steps of the window: height, width.", default=(2, 2))
        padding: Padding = param(
            "SAME: ceil(size / stride) outputs; VALID: windows inside only; FIXED: as SAME, but "
            "(window - 1) / 2 elements of padding before, for any size and stride.",
            default="SAME",
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name in ("window_shape", "strides"):
            if min(getattr(self.params, name)) < 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self.params, name)}, "
                    "must be at least 1"
                )

    @property
    def window(self) -> Window:
        """Window shape, strides and padding."""
        p = self.params
        return Window(p.window_shape, p.strides, (1, 1), p.padding)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of the output for an input of this height and width."""
        return self.window.output_size(height, 0), self.window.output_size(width, 1)


class MaxPool(Pool2D):
    """Returns the largest element of every window.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]
    """

    class Params(Pool2D.Params):
        """Params of MaxPool."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return ops.constrain_image(ctx, ops.max_pool(ctx, x, self.window))


class AveragePool(Pool2D):
    """Returns the mean of every window, over the elements inside the image.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]
    """

    class Params(Pool2D.Params):
        """Params of AveragePool."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return ops.constrain_image(ctx, ops.average_pool(ctx, x, self.window))


class GlobalAveragePool(Layer):
    """Returns the mean over height and width.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, channels]
    """

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return ctx.constrain(mean_over(x, [1, 2]), ("batch", "channels"))


def mean_over(x: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns the mean over some dims, in the type of x; the sum is float32 or wider.

    On CPUs, TensorFlow sums float16 numbers in float16: the mean of 4096 times 1.5 is 1.
    """
    return tf.cast(tf.reduce_mean(widen(x), list(axes)), x.dtype)


def mean_over_tokens(x: tf.Tensor, is_token: tf.Tensor) -> tf.Tensor:
    """Returns the mean over the tokens of every text, in the type of x; 0 without tokens.

    Shapes:
      x: [batch, length, dim]; is_token: [batch, length], 1 for tokens and 0 for padding
      returns: [batch, dim]
    """
    wide = widen(x)
    counted = tf.expand_dims(tf.cast(is_token, wide.dtype), 2)
    total = tf.reduce_sum(counted * wide, 1)
    return tf.cast(tf.math.divide_no_nan(total, tf.reduce_sum(counted, 1)), x.dtype)
