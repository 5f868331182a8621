"""Conv1D: convolution of sequences over time."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import KERNEL_ADAPTER_DOC


class Conv1D(Layer):
    """A convolution over the length of sequences, computed as one over images of width 1.

    On a mesh, the rules of images hold for it (convolution.py): "height" shards the length.

    Shapes:
      x: [batch, length, input_dim]
      returns: [batch, new length, output_dim], dtype of the weights; new length: length / stride,
        rounded up, except with padding VALID
    Children:
      conv: Conv2D, w [kernel_size, 1, input_dim / num_groups, output_dim]
    """

    class Params(Layer.Params):
        """Params of Conv1D."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        output_dim: int = param("Size of the last dim of the output.", default=REQUIRED)
        kernel_size: int = param("Number of elements of the kernel.", default=3)
        stride: int = param("Steps of the window.", default=1)
        dilation: int = param("Distance of the kernel's elements.", default=1)
        padding: Literal["SAME", "VALID", "FIXED", "CAUSAL"] = param(
            "As in Conv2D. CAUSAL: all zeros before, so an output depends on no later input.",
            default="SAME",
        )
        num_groups: int = param("Number of channel groups, convolved separately.", default=1)
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")
        kernel_adapter: Lora.Params | None = param(KERNEL_ADAPTER_DOC, default=None)

    conv: Conv2D

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        conv = Conv2D.Params(
            dtype=p.dtype,
            input_dim=p.input_dim,
            output_dim=p.output_dim,
            kernel_shape=(p.kernel_size, 1),
            strides=(p.stride, 1),
            dilations=(p.dilation, 1),
            padding="VALID" if p.padding == "CAUSAL" else p.padding,
            num_groups=p.num_groups,
            use_bias=p.use_bias,
            init=p.init,
            activation=p.activation,
            kernel_adapter=p.kernel_adapter,
        )
        self.child("conv", conv)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        p = self.params
        if p.padding == "CAUSAL":
            x = ctx.constrain(x, ("batch", None, None))  # a sharded dim cannot be padded
            x = tf.pad(x, [(0, 0), ((p.kernel_size - 1) * p.dilation, 0), (0, 0)])
        x = tf.reshape(x, [-1, x.shape[1], 1, x.shape[2]])
        y = self.conv.fprop(theta.conv, x, ctx)
        return tf.reshape(y, [-1, y.shape[1], p.output_dim])
