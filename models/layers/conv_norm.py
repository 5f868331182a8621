"""ConvNorm: a convolution, a normalisation and an activation, the unit of most image models."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.primitives.windows import Padding
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.lora import Lora
from tekso.models.layers.normalization import BatchNorm, Norm
from tekso.models.layers.projections import KERNEL_ADAPTER_DOC
from tekso.models.layers.sizes import with_sizes


class ConvNorm(Layer):
    """y = activation(norm(conv(x))); the convolution has no bias.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, output_dim]; see `output_size`
    Children:
      conv: Conv2D; norm
    """

    class Params(Layer.Params):
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

    conv: Conv2D
    norm: Norm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        conv = Conv2D.Params(
            dtype=p.dtype,
            input_dim=p.input_dim,
            output_dim=p.output_dim,
            kernel_shape=p.kernel_shape,
            strides=p.strides,
            padding=p.padding,
            num_groups=p.num_groups,
            init=p.init,
            use_bias=False,
            kernel_adapter=p.kernel_adapter,
        )
        self.child("conv", conv)
        self.child("norm", with_sizes(p.norm, dim=p.output_dim).set(dtype=p.dtype))

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of the output for an input of this height and width."""
        return self.conv.output_size(height, width)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        x = self.conv.fprop(theta.conv, x, ctx)
        x = self.norm.fprop(theta.norm, x, ctx)
        return ops.activate(ctx, self.params.activation, x)
