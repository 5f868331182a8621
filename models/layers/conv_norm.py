"""ConvNorm: a convolution, a normalisation and an activation, the unit of most image models."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.primitives.windows import Padding
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import Conv2D, ConvolutionBase
from tekso.models.layers.lora import Lora
from tekso.models.layers.normalization import BatchNorm, Norm
from tekso.models.layers.projections import KERNEL_ADAPTER_DOC
from tekso.models.layers.sizes import with_sizes


class ConvNormBase(Layer):
    """Base of the units y = activation(norm(conv(x))); the convolution has no bias.

    A subclass has Params with the fields of its convolution, and norm.

    Shapes:
      x: [batch, *spatial, input_dim]; spatial: height and width, or depth, height and width
      returns: [batch, *new spatial, output_dim]; see `output_size`
    Children:
      conv: the convolution; norm
    """

    class Params(Layer.Params):
        """Params of ConvNormBase."""

    convolution: ClassVar[type[ConvolutionBase]]
    conv: ConvolutionBase
    norm: Norm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p, conv = self.params, self.convolution.Params(use_bias=False)  # type: ignore[call-arg]
        same = [name for name in _FIELDS if name in p]
        self.child("conv", conv.set({name: p.get(name) for name in same}))
        self.child("norm", with_sizes(p.norm, dim=p.output_dim).set(dtype=p.dtype))

    def output_size(self, *sizes: int) -> tuple[int, ...]:
        """Returns the spatial sizes of the output for an input of these spatial sizes."""
        return self.conv.output_size(*sizes)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        x = self.conv.fprop(theta.conv, x, ctx)
        x = self.norm.fprop(theta.norm, x, ctx)
        return ops.activate(ctx, self.params.activation, x)


_FIELDS = (
    *("dtype", "input_dim", "output_dim", "kernel_shape", "strides", "padding"),
    *("num_groups", "init", "kernel_adapter"),
)
"""Fields of the convolution that a unit sets."""


class ConvNorm(ConvNormBase):
    """y = activation(norm(conv(x))); the convolution has no bias.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, output_dim]; see `output_size`
    Children:
      conv: Conv2D; norm
    """

    class Params(ConvNormBase.Params):
        """Params of ConvNorm."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        kernel_shape: tuple[int, int] = param("Height and width of the kernel.", default=(3, 3))
        strides: tuple[int, int] = param("Steps of the window: height, width.", default=(1, 1))
        padding: Padding = param("See Conv2D.", default="SAME")
        num_groups: int = param("Number of channel groups, convolved separately.", default=1)
        norm: Norm.Params = param("Normalisation.", default=BatchNorm.Params())
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")
        kernel_adapter: Lora.Params | None = param(KERNEL_ADAPTER_DOC, default=None)

    convolution = Conv2D
