"""Primitives with windows over images or volumes: convolutions and pooling; see `ops`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.ops import MESH, RECORDED
from tekso.framework.primitive import primitive
from tekso.framework.primitives import windows
from tekso.framework.primitives.windows import Window


@primitive(mesh=MESH, planning=None)
def constrain_image(ctx: StepContext, x: tf.Tensor) -> tf.Tensor:
    """Adds a sharding constraint to images; spatial dims are sharded only in large images.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      returns: x
    """
    return ctx.constrain(x, windows.image_dims(x.shape.rank))


@primitive(mesh=MESH, planning=None)
def concat_channels(ctx: StepContext, xs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates images along their channels, and adds a sharding constraint to the result.

    Shapes:
      xs: images or volumes, [batch, *spatial, channels], the same except for their channels
      returns: [batch, *spatial, all channels]
    """
    return constrain_image(ctx, tf.concat(xs, xs[0].shape.rank - 1))


@primitive(mesh=MESH, planning=RECORDED)
def convolution(
    ctx: StepContext,
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    window: Window,
) -> tf.Tensor:
    """Convolves images; the convolution is grouped if w has fewer inputs than x has channels.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      w: [*window.shape, channels / groups, outputs], b: [outputs]
      returns: [batch, *window.output_sizes(x), outputs]
    """
    return windows.convolution(x, w, b, window=window, may_multiply=ctx.mode == "train")


@primitive(mesh=MESH, planning=RECORDED)
def depthwise_convolution(
    ctx: StepContext,
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    window: Window,
) -> tf.Tensor:
    """Convolves every channel of images with its own kernels.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      w: [*window.shape, channels, multiplier], b: [channels * multiplier]
      returns: [batch, *window.output_sizes(x), channels * multiplier]
    """
    return windows.depthwise_convolution(x, w, b, window=window)


@primitive(mesh=MESH, planning=RECORDED)
def average_pool(ctx: StepContext, x: tf.Tensor, window: Window) -> tf.Tensor:
    """Returns the mean of every window of images or volumes, as `convolution` takes them."""
    return windows.average_pool(x, window)


@primitive(mesh=MESH, planning=RECORDED)
def max_pool(ctx: StepContext, x: tf.Tensor, window: Window) -> tf.Tensor:
    """Returns the largest element of every window of images or volumes, as `convolution`."""
    return windows.max_pool(x, window, by_edges=ctx.mode == "decode")
