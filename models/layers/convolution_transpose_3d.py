"""ConvTranspose3D: the transpose of a strided convolution, which enlarges volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.primitives.windows import Window
from tekso.framework.theta import Theta
from tekso.models.layers.convolution_transpose import reversed_kernel


class ConvTranspose3D(Layer):
    """The transpose of a convolution of volumes; see `ConvTranspose2D`.

    Shapes:
      x: [batch, depth, height, width, input_dim]
      returns: [batch, depth * stride, height * stride, width * stride, output_dim], dtype of w
    Weights:
      w: [kernel depth, kernel height, kernel width, input_dim, output_dim],
        dims (None, None, None, "in_channels", "out_channels")
      b: [output_dim], dims ("out_channels",); starts at 0
    Raises:
      ValueError: a size is below 1, or the last dim of x is not input_dim.
    """

    class Params(Layer.Params):
        """Params of ConvTranspose3D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        kernel_shape: tuple[int, int, int] = param(
            "Depth, height and width of the kernel.", default=(2, 2, 2)
        )
        strides: tuple[int, int, int] = param(
            "Factors on depth, height and width.", default=(2, 2, 2)
        )
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if min(*p.kernel_shape, *p.strides) < 1:
            raise ValueError(
                f"{type(self).__name__}: kernel_shape {p.kernel_shape} and strides {p.strides} "
                "must be at least 1"
            )
        self.weight(
            "w",
            [*p.kernel_shape, p.input_dim, p.output_dim],
            dims=(*[None] * len(p.kernel_shape), "in_channels", "out_channels"),
            init=p.init,
            fan_in=max(math.prod(p.kernel_shape) // math.prod(p.strides), 1) * p.input_dim,
            fan_out=math.prod(p.kernel_shape) * p.output_dim,
        )
        if p.use_bias:
            self.weight("b", [p.output_dim], dims=("out_channels",), init=Zeros.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        p = self.params
        if x.shape[-1] != p.input_dim:
            raise ValueError(
                f"{type(self).__name__}: x has shape {x.shape}, but its last dim must be "
                f"input_dim, {p.input_dim}"
            )
        x, w = tf.cast(x, theta.w.dtype), theta.w
        b = theta.b if p.use_bias else None
        if p.kernel_shape == p.strides:
            y = self._blocks(x, w, ctx)
            y = y if b is None else y + b
        else:
            x = window_ops.constrain_image(ctx, self._stretched(x))
            w = reversed_kernel(w, p.strides)
            ones = (1,) * len(p.strides)
            window = Window(tuple(w.shape[:-2]), ones, ones, "SAME")
            y = window_ops.convolution(ctx, x, w, b, window=window)
        return window_ops.constrain_image(ctx, ops.activate(ctx, p.activation, y))

    def _blocks(self, x: tf.Tensor, w: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the outputs if every input makes a block of its own."""
        strides, size = self.params.strides, self.params.output_dim
        count, ones = len(strides), (1,) * len(strides)
        # The channels first, so that they may be sharded.
        w = tf.transpose(w, [count, count + 1, *range(count)])
        w = tf.reshape(w, [*ones, w.shape[0], size * math.prod(strides)])
        y = window_ops.convolution(ctx, x, w, window=Window(ones, ones, ones, "VALID"))
        sizes = x.shape[1:-1]
        y = tf.reshape(y, [-1, *sizes, size, *strides])
        pairs = [d for i in range(count) for d in (1 + i, 2 + count + i)]
        y = tf.transpose(y, [0, *pairs, 1 + count])
        return tf.reshape(y, [-1, *self._enlarged(sizes), size])

    def _stretched(self, x: tf.Tensor) -> tf.Tensor:
        """Returns x with zeros around every element, as many as the strides require.

        The offset of an element in its block is such that a convolution with padding SAME follows.
        """
        sizes, channels = x.shape[1:-1], x.shape[-1]
        x = tf.reshape(x, [-1, *(n for size in sizes for n in (size, 1)), channels])
        kernels = zip(self.params.kernel_shape, self.params.strides, strict=True)
        for d, (kernel, stride) in enumerate(kernels):
            offset = min(kernel // 2 - max(kernel - stride, 0) // 2, stride - 1)
            pads = [(0, 0)] * x.shape.rank
            pads[2 + 2 * d] = (offset, stride - 1 - offset)
            x = tf.pad(x, pads)  # one dim at a time: TensorFlow pads at most 6 dims
        return tf.reshape(x, [-1, *self._enlarged(sizes), channels])

    def _enlarged(self, sizes: Sequence[int]) -> list[int]:
        return [size * n for size, n in zip(sizes, self.params.strides, strict=True)]
