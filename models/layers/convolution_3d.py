"""Conv3D: a convolution over volumes, channels last.

The dims of a volume between layers are "batch", "depth", "height", "width" and "channels"; mesh
rules for them are those of images (convolution.py), so `depth:model` cuts volumes along the depth.
"""

from __future__ import annotations

import math
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


class Conv3D(Layer):
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

    class Params(Layer.Params):
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
        for name in ("kernel_shape", "strides", "dilations"):
            if min(getattr(self.params, name)) < 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self.params, name)}, "
                    "must be at least 1"
                )
        p, name = self.params, type(self).__name__
        if p.num_groups < 1 or p.input_dim % p.num_groups or p.output_dim % p.num_groups:
            raise ValueError(
                f"{name}: num_groups {p.num_groups} must divide input_dim {p.input_dim} and "
                f"output_dim {p.output_dim}"
            )
        area = math.prod(p.kernel_shape)
        self.weight(
            "w",
            [*p.kernel_shape, p.input_dim // p.num_groups, p.output_dim],
            dims=(*[None] * len(p.kernel_shape), "in_channels", "out_channels"),
            init=p.init,
            fan_in=area * p.input_dim // p.num_groups,
            fan_out=area * p.output_dim // p.num_groups,
        )
        if p.use_bias:
            self.weight("b", [p.output_dim], dims=("out_channels",), init=Zeros.Params())

    @property
    def window(self) -> Window:
        """Kernel shape, strides, dilations and padding."""
        p = self.params
        return Window(p.kernel_shape, p.strides, p.dilations, p.padding)

    def output_size(self, *sizes: int) -> tuple[int, ...]:
        """Returns the spatial sizes of the output for an input of these spatial sizes."""
        return tuple(self.window.output_size(size, d) for d, size in enumerate(sizes))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        p = self.params
        if x.shape[-1] != p.input_dim:
            raise ValueError(
                f"{type(self).__name__}: x has shape {x.shape}, but its last dim must be "
                f"input_dim, {p.input_dim}"
            )
        self.output_size(*x.shape[1:-1])
        b = theta.b if p.use_bias else None
        x = tf.cast(x, theta.w.dtype)
        y = window_ops.convolution(ctx, x, theta.w, b, window=self.window)
        return window_ops.constrain_image(ctx, ops.activate(ctx, p.activation, y))
