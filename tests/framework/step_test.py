"""What a step rejects when it is traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.execution import DataParallel
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm


class OverTime(Task):
    """Normalises in every iteration of a loop over time, with the same weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        def body(weights: Any, state: Any, x: Any, ctx: Any) -> Any:
            return self.norm.fprop(weights, state + x, ctx), None

        times = tf.transpose(batch["x"], [1, 0, 2])
        last, _ = ops.scan(ctx, body, theta.norm, tf.zeros_like(times[0]), times)
        return LossSums(tf.reduce_sum(last))


def test_statistics_of_a_loop_over_time_are_refused_with_both_shapes() -> None:
    batch = {"x": np.ones([4, 5, 3], np.float32)}
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    program = (
        DataParallel.Params(towers=1, xla="none")
        .instantiate()
        .build(
            OverTime.Params().instantiate(),
            learner.instantiate(),
            seed=0,
            batch=signature_of(batch),
        )
    )
    program.initialize()
    with pytest.raises(ValueError, match=r"'norm/moving_mean' of shape \[5, 3\], but .* \[3\]\."):
        program.train_step(batch, 0)
