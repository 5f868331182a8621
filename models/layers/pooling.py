"""Pooling of images and volumes, channels last: maximum, average, and average over all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import window_ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.windows import Padding, Window
from tekso.framework.theta import Theta


class PoolBase(Layer):
    """Base of the poolings of images and volumes with a sliding window.

    A subclass has Params with window_shape, strides and padding.

    Shapes:
      x: [batch, *spatial, channels]; spatial: height and width, or depth, height and width
      returns: [batch, *new spatial, channels]; see `output_size`
    """

    class Params(Layer.Params):
        """Params of PoolBase."""

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
        return Window(p.window_shape, p.strides, (1,) * len(p.strides), p.padding)

    def output_size(self, *sizes: int) -> tuple[int, ...]:
        """Returns the spatial sizes of the output for an input of these spatial sizes."""
        return tuple(self.window.output_size(size, d) for d, size in enumerate(sizes))


class Pool2D(PoolBase):
    """Base of the poolings of images with a sliding window.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]; see `output_size`
    """

    class Params(PoolBase.Params):
        """Params of a pooling."""

        window_shape: tuple[int, int] = param("Height and width of the window.", default=(2, 2))
        strides: tuple[int, int] = param("Steps of the window: height, width.", default=(2, 2))
        padding: Padding = param(
            "SAME: ceil(size / stride) outputs; VALID: windows inside only; FIXED: as SAME, but "
            "(window - 1) / 2 elements of padding before, for any size and stride.",
            default="SAME",
        )


class Pool3D(PoolBase):
    """Base of the poolings of volumes with a sliding window.

    Shapes:
      x: [batch, depth, height, width, channels]
      returns: [batch, new depth, new height, new width, channels]; see `output_size`
    """

    class Params(PoolBase.Params):
        """Params of a pooling of volumes."""

        window_shape: tuple[int, int, int] = param(
            "Depth, height and width of the window.", default=(2, 2, 2)
        )
        strides: tuple[int, int, int] = param(
            "Steps of the window: depth, height, width.", default=(2, 2, 2)
        )
        padding: Padding = param("As in Pool2D.", default="SAME")


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
        return window_ops.constrain_image(ctx, window_ops.max_pool(ctx, x, self.window))


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
        return window_ops.constrain_image(ctx, window_ops.average_pool(ctx, x, self.window))


class MaxPool3D(Pool3D):
    """Returns the largest element of every window of volumes.

    Shapes:
      x: [batch, depth, height, width, channels]
      returns: [batch, new depth, new height, new width, channels]
    """

    class Params(Pool3D.Params):
        """Params of MaxPool3D."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return window_ops.constrain_image(ctx, window_ops.max_pool(ctx, x, self.window))


class AveragePool3D(Pool3D):
    """Returns the mean of every window of volumes, over the elements inside the volume.

    Shapes:
      x: [batch, depth, height, width, channels]
      returns: [batch, new depth, new height, new width, channels]
    """

    class Params(Pool3D.Params):
        """Params of AveragePool3D."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return window_ops.constrain_image(ctx, window_ops.average_pool(ctx, x, self.window))


class GlobalAveragePool(Layer):
    """Returns the mean over the spatial dims.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      returns: [batch, channels]
    """

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return ctx.constrain(mean_over(x, range(1, x.shape.rank - 1)), ("batch", "channels"))


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
