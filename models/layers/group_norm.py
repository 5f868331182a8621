"""GroupNorm: normalisation over height, width and groups of channels of one example."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Ones, Zeros
from tekso.framework.params import param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.layers.normalization import Norm


class GroupNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, with statistics of each example.

    Mean and variance are those of a group of neighbouring channels over all positions. One group is
    layer normalisation of the whole example; as many groups as channels are instance normalisation.
    Examples are independent, so the result does not depend on micro-batches and devices.

    Shapes:
      x: [batch, ..., dim]
      returns: shape and dtype of x
    Weights:
      scale, bias: [dim], start at 1 (`scale_init`) and 0
    Raises:
      ValueError: num_groups does not divide dim.
    Source: Wu & He 2018, "Group normalization", eq. 1 to 7.
    """

    class Params(Norm.Params):
        """Params of GroupNorm."""

        num_groups: int = param("Number of groups of channels.", default=32)
        epsilon: float = param("Added to the variance.", default=1e-5)
        scale_init: Initializer.Params = param("Initializer of scale.", default=Ones.Params())
        dims: tuple[str | None] = param("Dim name of the weights.", default=("channels",))

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_groups < 1 or p.dim % p.num_groups:
            raise ValueError(f"GroupNorm: num_groups {p.num_groups} must divide dim {p.dim}")
        self._vector("scale", p.scale_init)
        self._vector("bias", Zeros.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        wide, outer = widen(x), list(range(1, x.shape.rank - 1))
        theta = Theta((name, tf.cast(value, wide.dtype)) for name, value in theta.items())
        mean = self._means(tf.reduce_mean(wide, outer), ctx)
        deviation = wide - self._spread(mean, x.shape.rank)
        variance = self._means(tf.reduce_mean(tf.square(deviation), outer), ctx)
        factor = tf.math.rsqrt(variance + self.params.epsilon) * theta.scale
        y = deviation * self._spread(factor, x.shape.rank) + theta.bias
        return tf.cast(y, x.dtype)

    def _means(self, of_channels: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the mean of its group for every channel: [batch, dim] to [batch, dim]."""
        p = self.params
        x = ctx.constrain(of_channels, ("batch", None))
        x = tf.reshape(x, [-1, p.num_groups, p.dim // p.num_groups])
        x = tf.reduce_mean(x, 2, keepdims=True) * tf.ones_like(x)
        return ctx.constrain(tf.reshape(x, [-1, p.dim]), ("batch", p.dims[0]))

    def _spread(self, x: tf.Tensor, rank: int) -> tf.Tensor:
        """Returns [batch, dim] as [batch, 1, …, dim]."""
        return tf.reshape(x, [-1, *[1] * (rank - 2), self.params.dim])
