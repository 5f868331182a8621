"""Conv3D: a convolution over volumes, channels last.

The dims of a volume between layers are "batch", "depth", "height", "width" and "channels"; mesh
rules for them are those of images (convolution.py), so `depth:model` cuts volumes along the depth.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.primitives.windows import Padding
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import ConvolutionBase, with_channels


class Conv3D(ConvolutionBase):
    """y = activation(conv(x, w) + b), over volumes.

    Shapes:
      x: [batch, depth, height, width, input_dim]
      returns: [batch, new depth, new height, new width, output_dim], dtype of w
    Weights:
      w: [kernel depth, kernel height, kernel width, input_dim / num_groups, output_dim],
        dims (None, None, None, "in_channels", "out_channels")
      b: [output_dim], dims ("out_channels",); starts at 0
    Raises:
      ValueError: num_groups does not divide both sizes, or the last dim of x is not input_dim.
    """

    class Params(ConvolutionBase.Params):
        """Params of Conv3D."""

        kernel_shape: tuple[int, int, int] = param(
            "Depth, height and width of the kernel.", default=(3, 3, 3)
        )
        strides: tuple[int, int, int] = param(
            "Steps of the window: depth, height, width.", default=(1, 1, 1)
        )
        dilations: tuple[int, int, int] = param(
            "Distance of the kernel's elements: depth, height, width.", default=(1, 1, 1)
        )
        padding: Padding = param("As in Conv2D.", default="SAME")
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")
        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        num_groups: int = param(
            "Number of channel groups, convolved separately; divides both sizes.", default=1
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.declare_groups()

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        y = self._convolved(theta, with_channels(self, theta, x), ctx)
        return self._finish(y, ctx)
