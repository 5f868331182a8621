"""SqueezeExcite: scales the channels of an image by factors computed from their means."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.linear import Linear
from tekso.models.layers.pooling import GlobalAveragePool


class SqueezeExcite(Layer):
    """y = x * gate(w2 activation(w1 mean(x) + b1) + b2), a factor for each channel.

    Shapes:
      x: [batch, height, width, dim]
      returns: shape and dtype of x
    Children:
      reduce: Linear, dim to max(dim // reduction, 1), dims ("channels", "mlp")
      expand: Linear, back to dim, dims ("mlp", "channels")
    Raises:
      ValueError: the reduction is below 1.
    Source: Hu et al. 2018, "Squeeze-and-excitation networks", eq. 2 to 4; biases as in the
      authors' code.
    """

    class Params(Layer.Params):
        """Params of SqueezeExcite."""

        dim: int = param("Number of channels.", default=REQUIRED)
        reduction: int = param("Channels per hidden unit.", default=16)
        activation: Activation = param("Applied to the hidden units.", default="relu")
        gate: Activation = param("Applied to the factors.", default="sigmoid")

    reduce: Linear
    expand: Linear
    mean: GlobalAveragePool

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.reduction < 1:
            raise ValueError(f"SqueezeExcite: reduction is {p.reduction}, must be at least 1")
        hidden = max(p.dim // p.reduction, 1)
        linear = Linear.Params(dtype=p.dtype)
        self.child("mean", GlobalAveragePool.Params())
        self.child(
            "reduce",
            linear.copy().set(
                input_dim=p.dim,
                output_dim=hidden,
                activation=p.activation,
                dims=("channels", "mlp"),
            ),
        )
        self.child(
            "expand",
            linear.copy().set(
                input_dim=hidden, output_dim=p.dim, activation=p.gate, dims=("mlp", "channels")
            ),
        )

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        factor = self.mean.fprop(theta.mean, x, ctx)
        factor = self.reduce.fprop(theta.reduce, factor, ctx)
        factor = self.expand.fprop(theta.expand, factor, ctx)
        factor = ctx.constrain(factor, ("batch", "channels"))
        return x * tf.reshape(factor, [-1, 1, 1, self.params.dim])
