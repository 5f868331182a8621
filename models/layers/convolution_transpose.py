"""ConvTranspose2D: the transpose of a strided convolution, which enlarges images."""

from __future__ import annotations

import functools
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
from tekso.models.layers.convolution import AdaptedKernel, with_channels


class ConvTransposeBase(Layer):
    """Base of the transposed convolutions of images and volumes.

    A subclass has Params with input_dim, output_dim, kernel_shape, strides, use_bias, init and
    activation.

    Shapes:
      x: [batch, *spatial, input_dim]; spatial: height and width, or depth, height and width
      returns: [batch, *(spatial * strides), output_dim], dtype of w
    Weights:
      w: [*kernel, input_dim, output_dim]; b: [output_dim]
    """

    class Params(Layer.Params):
        """Params of ConvTransposeBase."""

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
        x = with_channels(self, theta, x)
        y = self._convolved(ctx, x, theta.w, theta.b if p.use_bias else None)
        y = self._updated(theta, x, y, ctx)
        return window_ops.constrain_image(ctx, ops.activate(ctx, p.activation, y))

    def _updated(self, theta: Theta, x: tf.Tensor, y: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns y with what a subclass adds."""
        del theta, x, ctx
        return y

    def _convolved(
        self, ctx: StepContext, x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None
    ) -> tf.Tensor:
        p = self.params
        if p.kernel_shape == p.strides:
            y = self._blocks(x, w, ctx)
            return y if b is None else y + b
        x = window_ops.constrain_image(ctx, self._stretched(x))
        w, ones = reversed_kernel(w, p.strides), (1,) * len(p.strides)
        window = Window(tuple(w.shape[:-2]), ones, ones, "SAME")
        return window_ops.convolution(ctx, x, w, b, window=window)

    def _blocks(self, x: tf.Tensor, w: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the outputs if every input makes a block of its own."""
        strides, size = self.params.strides, w.shape[-1]
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


class ConvTranspose2D(ConvTransposeBase, AdaptedKernel):
    """The transpose of a convolution with padding SAME: height and width grow by the strides.

    y[i * stride + k - before] += x[i] w[k], where `before` is the padding of the convolution. It is
    computed as a convolution of x with zeros between its elements; if the kernel is the stride, as
    one product. (PyTorch's ConvTranspose2d(2, stride=2) and (4, stride=2, padding=1) are equal.)

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, height * stride, width * stride, output_dim], dtype of w
    Weights:
      w: [kernel height, kernel width, input_dim, output_dim],
        dims (None, None, "in_channels", "out_channels")
      b: [output_dim], dims ("out_channels",); starts at 0
      w_lora_a, w_lora_b: with an adapter (see AdaptedKernel)
    Raises:
      ValueError: a size is below 1, or the last dim of x is not input_dim.
    Source: Dumoulin & Visin 2016, "A guide to convolution arithmetic", chapter 4.
    """

    class Params(ConvTransposeBase.Params, AdaptedKernel.Params):
        """Params of ConvTranspose2D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        kernel_shape: tuple[int, int] = param("Height and width of the kernel.", default=(2, 2))
        strides: tuple[int, int] = param("Factors on height and width.", default=(2, 2))
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.adapt_kernel([*p.kernel_shape, p.input_dim, p.output_dim])

    def _updated(self, theta: Theta, x: tf.Tensor, y: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.updated(theta, x, y, ctx, functools.partial(self._convolved, ctx))


def reversed_kernel(w: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Returns a kernel with its spatial dims in reverse order, without ops unknown to DTensor.

    An even size without a stride gets an element 0 at the end, because SAME would pad one element
    too few before the image. (`workarounds.reverse` is for tensors with a batch dim.)

    Shapes:
      w: [*kernel, inputs, outputs]; kernel has as many dims as there are strides
      returns: as w, except for the elements 0
    """
    for axis, stride in enumerate(strides):
        size = w.shape[axis]
        w = tf.concat(tf.split(w, size, axis)[::-1], axis)
        if stride == 1 and size % 2 == 0:
            w = tf.pad(w, [(0, 1 if i == axis else 0) for i in range(w.shape.rank)])
    return w
