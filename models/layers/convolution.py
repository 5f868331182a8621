"""Convolutions over images, channels last: full, grouped and depthwise.

The dims of an image between layers are "batch", "height", "width" and "channels". The weights of a
convolution have "in_channels" and "out_channels". Mesh rules for them:

    height:model                        shard images; neighbours exchange halos
    out_channels:model                  shard weights; images are replicated
    channels:model;out_channels:model   shard both; a convolution gathers the channels of its input
    channels:model;in_channels:model    shard both; a convolution all-reduces its output
    height:model;out_channels:model     shard images; weights are stored sharded, gathered for use
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.primitives.windows import Padding, Window
from tekso.framework.theta import Theta
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import KERNEL_ADAPTER_DOC, AdaptedLayer


class ConvolutionBase(Layer):
    """Base of the convolutions of images and volumes: window, weights and activation.

    A subclass has Params with kernel_shape, strides, dilations, padding, use_bias, init and
    activation.

    Shapes:
      x: [batch, *spatial, input channels]; spatial: height and width, or depth, height and width
      returns: [batch, *new spatial, output channels], dtype of w; see `output_size`
    Weights:
      w: begins with the dims of the kernel; b: [output channels]
    """

    class Params(Layer.Params):
        """Params of ConvolutionBase."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name in ("kernel_shape", "strides", "dilations"):
            if min(getattr(self.params, name)) < 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self.params, name)}, "
                    "must be at least 1"
                )

    @property
    def window(self) -> Window:
        """Kernel shape, strides, dilations and padding."""
        p = self.params
        return Window(p.kernel_shape, p.strides, p.dilations, p.padding)

    def output_size(self, *sizes: int) -> tuple[int, ...]:
        """Returns the spatial sizes of the output for an input of these spatial sizes."""
        return tuple(self.window.output_size(size, d) for d, size in enumerate(sizes))

    def declare_groups(self) -> list[int]:
        """Declares the weights of a convolution in `num_groups` groups; returns the shape of w.

        Raises:
          ValueError: num_groups does not divide both sizes.
        """
        p = self.params
        if p.num_groups < 1 or p.input_dim % p.num_groups or p.output_dim % p.num_groups:
            raise ValueError(
                f"{type(self).__name__}: num_groups {p.num_groups} must divide input_dim "
                f"{p.input_dim} and output_dim {p.output_dim}"
            )
        area = math.prod(p.kernel_shape)
        shape = [*p.kernel_shape, p.input_dim // p.num_groups, p.output_dim]
        self.weight(
            "w",
            shape,
            dims=(*[None] * len(p.kernel_shape), "in_channels", "out_channels"),
            init=p.init,
            fan_in=area * p.input_dim // p.num_groups,
            fan_out=area * p.output_dim // p.num_groups,
        )
        if p.use_bias:
            self.weight("b", [p.output_dim], dims=("out_channels",), init=Zeros.Params())
        return shape

    def _convolved(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns conv(x, w) + b of x in the dtype of w."""
        self.output_size(*x.shape[1:-1])
        b = theta.b if self.params.use_bias else None
        return window_ops.convolution(ctx, x, theta.w, b, window=self.window)

    def _finish(self, y: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return window_ops.constrain_image(ctx, ops.activate(ctx, self.params.activation, y))


def with_channels(layer: Layer, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    """Returns the input of a convolution in the dtype of its weights.

    Raises:
      ValueError: its last dim is not input_dim.
    """
    if x.shape[-1] != layer.params.input_dim:
        raise ValueError(
            f"{type(layer).__name__}: x has shape {x.shape}, but its last dim must be input_dim, "
            f"{layer.params.input_dim}"
        )
    return tf.cast(x, theta.w.dtype)


class Conv2DBase(ConvolutionBase):
    """Base of the convolutions: window, bias and activation.

    Shapes:
      x: [batch, height, width, input channels]
      returns: [batch, new height, new width, output channels], dtype of w; see `output_size`
    Weights:
      w: begins with the dims [kernel height, kernel width]; b: [output channels]
    """

    class Params(ConvolutionBase.Params):
        """Params of a convolution."""

        kernel_shape: tuple[int, int] = param("Height and width of the kernel.", default=(3, 3))
        strides: tuple[int, int] = param("Steps of the window: height, width.", default=(1, 1))
        dilations: tuple[int, int] = param(
            "Distance of the kernel's elements: height, width.", default=(1, 1)
        )
        padding: Padding = param(
            "SAME: ceil(size / stride) outputs, zeros around; VALID: inside only; FIXED: as SAME, "
            "but (kernel - 1) / 2 zeros before, for any size and stride.",
            default="SAME",
        )
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")


class AdaptedKernel(AdaptedLayer):
    """Base of the convolutions whose kernel w may have an adapter.

    The update of conv(x, w) is (alpha / rank) * conv(dropout(x), lora_a) @ lora_b.

    Shapes:
      as in the subclasses
    Weights:
      w: [kernel height, kernel width, input channels, output channels]
      w_lora_a: [kernel height, kernel width, input channels, rank]
      w_lora_b: [rank, output channels]
    """

    class Params(AdaptedLayer.Params):
        """Params of a convolution with an adapter."""

        kernel_adapter: Lora.Params | None = param(KERNEL_ADAPTER_DOC, default=None)

    adapter_field = "kernel_adapter"

    def adapt_kernel(self, shape: Sequence[int]) -> None:
        """Declares the weights of the adapter of the kernel."""
        dims = (None, None, "in_channels", "out_channels")
        self.adapt("w", shape, dims=dims, num_contracted=3)

    def updated(
        self,
        theta: Theta,
        x: tf.Tensor,
        y: tf.Tensor,
        ctx: StepContext,
        convolve: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Returns y and the update of the adapter.

        Args:
          theta: the weights.
          x: the input.
          y: `convolve(x, w)`, possibly with the bias.
          ctx: the step context.
          convolve: `convolve(x, kernel)` is the convolution without bias.

        Shapes:
          x: [batch, height, width, input channels]
          y: [batch, new height, new width, output channels]
          returns: as y
        """
        if (lora := self.lora("w")) is None:
            return y
        x = ops.dropout(ctx, x, lora.params.dropout_rate, self, "w_lora")
        return y + lora.scale * ops.project(ctx, convolve(x, theta.w_lora_a), theta.w_lora_b)


class Conv2D(Conv2DBase, AdaptedKernel):
    """y = activation(conv(x, w) + b).

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, output_dim], dtype of w
    Weights:
      w: [kernel height, kernel width, input_dim / num_groups, output_dim],
        dims (None, None, "in_channels", "out_channels")
      b: [output_dim], dims ("out_channels",); starts at 0
      w_lora_a, w_lora_b: with an adapter (see AdaptedKernel)
    Raises:
      ValueError: num_groups does not divide both sizes, or is not 1 with an adapter; the last dim
        of x is not input_dim.
    """

    class Params(Conv2DBase.Params, AdaptedKernel.Params):
        """Params of Conv2D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        num_groups: int = param(
            "Number of channel groups, convolved separately; divides both sizes.", default=1
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p, shape = self.params, self.declare_groups()
        if p.num_groups > 1 and p.kernel_adapter is not None:
            raise ValueError(
                f"{p.path_of('kernel_adapter')} is set, but the convolution has {p.num_groups} "
                "groups: only convolutions with one group have adapters; set it to None"
            )
        self.adapt_kernel(shape)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        x = with_channels(self, theta, x)
        y = self._convolved(theta, x, ctx)
        convolve = functools.partial(window_ops.convolution, ctx, window=self.window)
        return self._finish(self.updated(theta, x, y, ctx, convolve), ctx)


class DepthwiseConv2D(Conv2DBase):
    """Convolves every channel with `multiplier` separate kernels.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, input_dim * multiplier], dtype of w; the outputs of a
        channel are next to each other
    Weights:
      w: [kernel height, kernel width, input_dim, multiplier], dims (None, None, "channels", None)
      b: [input_dim * multiplier], dims ("channels",); starts at 0
    Raises:
      ValueError: the last dim of x is not input_dim.
    Source: Sifre & Mallat 2014; Chollet 2017.
    """

    class Params(Conv2DBase.Params):
        """Params of DepthwiseConv2D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        multiplier: int = param("Outputs of each channel.", default=1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        area = math.prod(p.kernel_shape)
        self.weight(
            "w",
            [*p.kernel_shape, p.input_dim, p.multiplier],
            dims=(None, None, "channels", None),
            init=p.init,
            fan_in=area,
            fan_out=area * p.multiplier,
        )
        if p.use_bias:
            self.weight("b", [p.input_dim * p.multiplier], dims=("channels",), init=Zeros.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        p = self.params
        if x.shape[-1] != p.input_dim:
            raise ValueError(
                f"DepthwiseConv2D: x has shape {x.shape}, but its last dim must be input_dim, "
                f"{p.input_dim}"
            )
        b = theta.b if p.use_bias else None
        x = tf.cast(x, theta.w.dtype)
        return self._finish(
            window_ops.depthwise_convolution(ctx, x, theta.w, b, window=self.window), ctx
        )


class SeparableConv2D(Conv2DBase):
    """A depthwise convolution, then a 1x1 convolution: y = activation(conv1x1(depthwise(x)) + b).

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, output_dim], dtype of the weights
    Children:
      depthwise: DepthwiseConv2D, without bias; pointwise: Conv2D, 1x1
    Source: Chollet 2017, "Xception".
    """

    class Params(Conv2DBase.Params):
        """Params of SeparableConv2D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        multiplier: int = param("Outputs of each channel between the two.", default=1)
        kernel_adapter: Lora.Params | None = param(
            "Low-rank update of the pointwise kernel, for fine-tuning; None: none.", default=None
        )

    depthwise: DepthwiseConv2D
    pointwise: Conv2D

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        depthwise = DepthwiseConv2D.Params(
            dtype=p.dtype,
            input_dim=p.input_dim,
            multiplier=p.multiplier,
            kernel_shape=p.kernel_shape,
            strides=p.strides,
            dilations=p.dilations,
            padding=p.padding,
            init=p.init,
            use_bias=False,
        )
        pointwise = Conv2D.Params(
            dtype=p.dtype,
            input_dim=p.input_dim * p.multiplier,
            output_dim=p.output_dim,
            kernel_shape=(1, 1),
            init=p.init,
            use_bias=p.use_bias,
            activation=p.activation,
            kernel_adapter=p.kernel_adapter,
        )
        self.child("depthwise", depthwise)
        self.child("pointwise", pointwise)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        x = self.depthwise.fprop(theta.depthwise, x, ctx)
        return self.pointwise.fprop(theta.pointwise, x, ctx)
