"""Normalisation of the last dim: LayerNorm, RMSNorm, and BatchNorm over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Ones, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta

_ONES, _ZEROS = Ones.Params().freeze(), Zeros.Params().freeze()  # need no copy for each weight


class Norm(Layer):
    """Base of the normalisations: [..., dim] to the same shape and dtype.

    Shapes:
      x: [..., dim]
      returns: shape and dtype of x
    Weights: all are [dim], with the dim name in `dims`.
    """

    class Params(Layer.Params):
        """Params of a normalisation."""

        dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        epsilon: float = param("Added to the variance.", default=1e-6)
        dims: tuple[str | None] = param("Dim name of the weights.", default=("embed",))

    def _vector(self, name: str, init: Any, *, trainable: bool = True) -> None:
        p = self.params
        self.weight(name, [p.dim], dims=p.dims, init=init, trainable=trainable)


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, over the last dim.

    Shapes:
      x: [..., dim]
      returns: shape and dtype of x
    Weights:
      scale: [dim], starts at 1; bias: [dim], starts at 0
    Source: Ba et al. 2016, eq. 4.
    """

    class Params(Norm.Params):
        """Params of LayerNorm."""

        use_bias: bool = param("Whether to add a bias.", default=True)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._vector("scale", _ONES)
        if self.params.use_bias:
            self._vector("bias", _ZEROS)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        bias = theta.bias if self.params.use_bias else None
        return ops.layer_norm(ctx, x, theta.scale, bias, epsilon=self.params.epsilon)


class RMSNorm(Norm):
    """x / sqrt(mean(x**2) + epsilon) * scale, over the last dim.

    Shapes:
      x: [..., dim]
      returns: shape and dtype of x
    Weights:
      scale: [dim], starts at 1
    Source: Zhang & Sennrich 2019, eq. 4.
    """

    class Params(Norm.Params):
        """Params of RMSNorm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._vector("scale", _ONES)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return ops.rms_norm(ctx, x, theta.scale, epsilon=self.params.epsilon)


class BatchNorm(Norm):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, with statistics of the batch.

    In training, mean and variance are computed over all examples and positions that run at the same
    time (all replicas, or one micro-batch of a pipeline). Outside training, the moving statistics
    are used. Every step updates them once with the mean and (biased) variance of the whole global
    batch: moving = decay * moving + (1 - decay) * batch. They keep their values if no element
    counts in the whole global batch. Moving statistics that `learner.frozen`
    matches do not change; training still normalises with the statistics of the batch.

    With `group`, an example is normalised with the mean and variance of its group: `group`
    consecutive examples of the global batch, wherever they run (of a pipeline, those in its
    micro-batch). The moving statistics are of the whole global batch all the same.

    Shapes:
      x: [batch, ..., dim]
      mask: bool [batch, ...], broadcastable to x without its last dim; elements that are False do
        not count in the statistics
      returns: shape and dtype of x
    Weights:
      scale, bias: [dim], start at 1 (`scale_init`) and 0
      moving_mean, moving_variance: [dim], start at 0 and 1, not trained
    Source: Ioffe & Szegedy 2015, algorithms 1 and 2; groups: Ying et al. 2018, "Image
      classification at supercomputer scale", section 3.4.
    """

    class Params(Norm.Params):
        """Params of BatchNorm."""

        group: int | None = param(
            "Consecutive examples of the global batch that share statistics; None: all.",
            default=None,
        )

        epsilon: float = param("Added to the variance.", default=1e-3)
        decay: float = param("Decay of the moving statistics per step.", default=0.99)
        scale_init: Initializer.Params = param("Initializer of scale.", default=Ones.Params())
        dims: tuple[str | None] = param("Dim name of the weights.", default=("channels",))

    couples_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not 0 <= self.params.decay < 1:
            raise ValueError(f"BatchNorm: decay {self.params.decay} is not in [0, 1)")
        if self.params.group is not None and self.params.group < 1:
            raise ValueError(f"BatchNorm: group {self.params.group} must be at least 1, or None")
        self._vector("scale", self.params.scale_init)
        self._vector("bias", _ZEROS)
        self._vector("moving_mean", _ZEROS, trainable=False)
        self._vector("moving_variance", _ONES, trainable=False)

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """See the class."""
        wide = widen(x)
        theta = Theta((name, tf.cast(value, wide.dtype)) for name, value in theta.items())
        if not ctx.is_training:
            return self._normalised(theta, x, theta.moving_mean, theta.moving_variance)
        if mask is not None:
            mask = tf.broadcast_to(tf.expand_dims(mask, -1), [*x.shape[:-1], 1])
        if self.params.group is not None:
            counted = tf.ones_like(wide[..., :1]) if mask is None else tf.cast(mask, wide.dtype)
            self._collect_around_moving_mean(theta, wide, ctx, counted)
            return self._normalised(theta, x, *self._group_statistics(wide, ctx, counted))
        found = ops.batch_norm(
            ctx, x, theta.scale, theta.bias, mask, epsilon=self.params.epsilon, layer=self
        )
        away = tf.stop_gradient(found.mean - theta.moving_mean)
        shift = found.total - found.count * tf.stop_gradient(theta.moving_mean)
        rest = found.total - found.count * found.mean
        square = found.squares + away * (2 * rest + found.count * away)
        self._collect(ctx, shift, square, found.count)
        return found.y

    def _normalised(
        self, theta: Theta, x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
    ) -> tf.Tensor:
        factor = tf.math.rsqrt(variance + self.params.epsilon) * theta.scale
        return tf.cast(widen(x) * factor + (theta.bias - mean * factor), x.dtype)

    def _collect(
        self, ctx: StepContext, shift: tf.Tensor, square: tf.Tensor, count: tf.Tensor
    ) -> None:
        """Collects sums for the moving statistics, which can be added over parts of the batch.

        They are centred on the moving mean, to avoid cancellation in the variance.
        """
        weight = tf.fill([self.params.dim], count)
        ctx.collect_statistic(self, "shift", shift, weight)
        ctx.collect_statistic(self, "square", square, weight)
        ctx.collect_statistic(self, "count", weight, tf.ones_like(weight))

    def _collect_around_moving_mean(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, counted: tf.Tensor
    ) -> None:
        outer = list(range(x.shape.rank - 1))
        shifted = tf.stop_gradient((x - theta.moving_mean) * counted)
        shift, square = tf.reduce_sum(shifted, outer), tf.reduce_sum(tf.square(shifted), outer)
        self._collect(ctx, shift, square, tf.reduce_sum(counted))

    def _group_statistics(
        self, x: tf.Tensor, ctx: StepContext, counted: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance of the group of every example, [batch, 1, …, 1, dim].

        Examples are added to their groups, and get the values of their groups, by products with a
        matrix of zeros and ones: groups may span replicas, and the batch may be sharded.
        """
        size, inner = self.params.group, list(range(1, x.shape.rank - 1))
        examples = x.shape[0] if ctx.num_examples is None else ctx.num_examples
        place = tf.range(x.shape[0]) + tf.cast(ctx.example_offset, tf.int32)
        member = tf.one_hot(place // size, -(-examples // size), dtype=x.dtype)  # [batch, groups]

        def of_groups(values: tf.Tensor) -> tf.Tensor:
            own = tf.matmul(member, tf.reduce_sum(values, inner), transpose_a=True)
            return ops.sum_over_replicas(ctx, own, self)

        def of_examples(values: tf.Tensor) -> tf.Tensor:
            found = tf.matmul(member, values)
            return tf.reshape(found, [x.shape[0], *([1] * len(inner)), x.shape[-1]])

        total = tf.maximum(of_groups(counted), 1.0)
        mean = of_examples(of_groups(x * counted) / total)
        variance = of_groups(tf.square(x - mean) * counted) / total
        return mean, of_examples(variance)

    def updated_statistics(
        self, theta: Theta, statistics: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Returns the updated moving mean and variance; see `Layer.updated_statistics`."""
        shift = tf.cast(statistics["shift"], theta.moving_mean.dtype)
        square = tf.cast(statistics["square"], theta.moving_mean.dtype)
        kept = self.params.decay
        variance = tf.maximum(square - tf.square(shift), 0)
        new = {
            "moving_mean": theta.moving_mean + (1 - kept) * shift,
            "moving_variance": kept * theta.moving_variance + (1 - kept) * variance,
        }
        counted = statistics["count"] > 0  # a value for each element of the weights, sharded alike
        return {name: tf.where(counted, value, theta[name]) for name, value in new.items()}
