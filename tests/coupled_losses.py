"""Tasks whose losses couple the examples of a batch, as an in-batch softmax does."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Normal
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm


class InBatch(Task):
    """A softmax over the examples at hand."""

    couples_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))
        self.weight("w", [3, 5], dims=(None, None), init=Normal.Params(stddev=1.0))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def others(self, z: tf.Tensor, ctx: StepContext) -> tuple[tf.Tensor, Any]:
        return z, 0

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = self.norm.fprop(theta.norm, batch["x"], ctx) @ theta.w
        z += ctx.uniform(self, z.shape)
        others, start = self.others(z, ctx)
        place = tf.range(z.shape[0]) + tf.cast(start, tf.int32)
        scores = tf.matmul(z, others, transpose_b=True)
        nats = tf.nn.sparse_softmax_cross_entropy_with_logits(place, scores)
        return LossSums(tf.reduce_sum(batch["weights"] * nats))


class Gathered(InBatch):
    """A softmax over the examples of all devices."""

    gathers_examples = True

    def others(self, z: tf.Tensor, ctx: StepContext) -> tuple[tf.Tensor, Any]:
        place = tf.range(z.shape[0]) + tf.cast(ctx.example_offset, tf.int32)
        member = tf.one_hot(place, ctx.num_examples)
        rows = tf.matmul(member, z, transpose_a=True)
        return ops.sum_over_replicas(ctx, rows, self), ctx.example_offset


class Misplaced(Gathered):
    """Forgets where its own examples are."""

    def others(self, z: tf.Tensor, ctx: StepContext) -> tuple[tf.Tensor, Any]:
        return super().others(z, ctx)[0], 0
