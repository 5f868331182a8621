"""A task with a mistake, for the checks before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Normal
from tekso.framework.input.input import ExampleInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.run import loss_check
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task


class Points(ExampleInput):
    """Seven points."""

    @property
    def num_examples(self) -> int:
        return 7

    def examples(self, index: Any, epoch: Any) -> Any:
        x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)[index]
        return {"x": x, "weights": np.ones(len(index), np.float32)}


class Squares(Task):
    """The sum of squares, or what the way of the test makes of them."""

    class Params(Task.Params):
        """Params of Squares."""

        way: str = param("What is wrong.", default="nothing")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [3], dims=("embed",), init=Normal.Params(stddev=1.0))
        self.weight("unused", [2], dims=("embed",), init=Normal.Params())
        self.couples_examples = self.params.way.startswith("coupled")
        self.iterations = 0  # of loops, that were traced or computed
        self.calls = 0

    def loss_weight(self, batch: Any) -> tf.Tensor:
        if self.params.way == "mean weight":
            return tf.reduce_mean(batch["weights"])
        return tf.reduce_sum(batch["weights"])

    def _same(self, theta: Any, x: Any, _: Any, ctx: StepContext) -> Any:
        self.iterations += 1
        for _ in range(30):  # as many ops as a cell has
            x = tf.identity(x)
        return x, None

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        way, x = self.params.way, batch["x"]
        if way.endswith("loop"):
            turns = tf.zeros([100 if way.endswith("long loop") else 2])
            x, _ = ops.scan(ctx, self._same, theta, x, turns)
        squares = tf.square(tf.linalg.matvec(x, theta.w))
        if way in ("used in training", "loop", "long loop") and ctx.is_training:
            squares += tf.reduce_sum(theta.unused)
        if way.startswith(("scores", "probabilities", "log probabilities")):
            scores = tf.stack([squares, tf.zeros_like(squares), -squares], 1)
            if way != "scores":
                scores = tf.nn.softmax(scores)
            if way == "log probabilities":
                scores = tf.math.log(scores)
            labels = tf.zeros_like(squares, tf.int32)
            squares = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        if way == "fixed":
            squares = tf.reshape(squares, [4])
        if way == "noise":
            squares += ctx.uniform(self, [x.shape[0]])
        if way == "noise without a seed":
            squares += tf.random.uniform([x.shape[0]])
        if way == "coupled by stateless noise" and ctx.is_training:
            squares += tf.random.stateless_normal([x.shape[0]], [1, 2])
        if way == "a constant of stateless noise":
            squares *= tf.reduce_sum(tf.square(tf.random.stateless_normal([3], [1, 2])))
        if way == "noise of NumPy":
            squares += np.random.default_rng().uniform(size=[x.shape[0]]).astype(np.float32)
        if way.endswith("counts its calls"):
            self.calls += 1
            squares *= self.calls
        if way == "differs in its fourth call":
            self.calls += 1
            squares *= [1.0, 2.0, 1.0, 3.0][self.calls - 1]
        if way == "overflows":
            squares *= tf.constant(1e38) * 1e38
        if way == "mean in training" and ctx.is_training:
            return LossSums(tf.reduce_mean(batch["weights"] * squares))
        if way == "mean of 1e-9":
            return LossSums(1e-9 * tf.reduce_mean(batch["weights"] * squares))
        if way == "penalty collected":
            ctx.collect_loss("l2", tf.nn.l2_loss(theta.w))
        if way == "penalty times examples":
            ctx.collect_loss("l2", float(x.shape[0]) * tf.nn.l2_loss(theta.w))
        if way == "metric of 16":
            return LossSums(tf.reduce_sum(batch["weights"] * squares), {"size": (0.0, 16.0)})
        if way == "penalty of NumPy":
            ctx.collect_loss("l2", tf.constant(np.random.default_rng().uniform(1.0, 9.0)))
        if way == "penalty":
            return LossSums(tf.reduce_sum(batch["weights"] * squares) + 0.02 * tf.norm(theta.w))
        if way == "mean":
            return LossSums(tf.reduce_mean(batch["weights"] * squares))
        if way.startswith("coupled"):
            counted = (
                tf.ones_like(squares) if way == "coupled, padding counts" else batch["weights"]
            )
            return LossSums(tf.square(tf.reduce_sum(counted * squares)))
        if way == "copies count":
            return LossSums(tf.reduce_sum(squares))
        if way.startswith("metric"):
            weights = batch["weights"]
            total, weight = map(tf.reduce_sum, (squares * weights, weights))
            if way == "metric counts in its sum":
                pair = (tf.reduce_sum(squares), weight)
            elif way == "metric counts in its weight":
                pair = (total, tf.reduce_sum(tf.ones_like(weights)))
            elif way == "metric counts if right":
                pair = (tf.reduce_sum(tf.cast(batch["x"][:, 0] > 1, tf.float32)), weight)
            elif way == "metric is no number on padding":
                pair = (tf.reduce_sum(squares * weights / weights), weight)
            elif way == "metric of NumPy":
                pair = (total * np.random.default_rng().uniform(1.0, 9.0), weight)
            elif way == "metric is a mean":
                pair = (tf.reduce_mean(squares), tf.constant(1.0))
            elif way == "metric of the weights":
                pair = (tf.norm(theta.w), tf.constant(1.0))
            else:
                pair = (total, tf.maximum(weight, 1.0))
            return LossSums(tf.reduce_sum(weights * squares), {"size": pair})
        if way == "layer metric counts":
            ctx.collect_metric("mean square", tf.reduce_sum(squares), tf.size(squares))
        if way == "layer metric is a mean that counts":
            ctx.collect_metric("mean square", tf.reduce_mean(squares), 1.0)
        if way == "layer metric of the weights":
            ctx.collect_metric("norm", tf.norm(theta.w), 1.0)
        if way == "no number on padding":
            return LossSums(tf.reduce_sum(squares * batch["weights"] / batch["weights"]))
        return LossSums(tf.reduce_sum(batch["weights"] * squares))


class OnHost:
    """A program that only has weights."""

    serialize_calls = False

    def __init__(self, task: Task) -> None:
        self._theta = task.init(seed=1)

    def call(self, function: Any, *inputs: Any) -> Any:
        return function(self._theta, *inputs, StepContext(mode="decode"))


def check(
    way: str, kind: type[Squares] = Squares, train: type[Points] = Points, **learner: Any
) -> list[str]:
    """Returns the warnings of the check, and why it could not be made."""
    task = kind.Params(way=way).instantiate()
    params = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {
        "input": train.Params(batch_size=4).instantiate(),
        "eval_inputs.dev": Points.Params(batch_size=4, order="once").instantiate(),
    }
    found = loss_check.check(task, params.set(learner).instantiate(), OnHost(task), inputs)
    assert bool(found.unchecked) == (way == "fixed") and not (found.warnings and found.unchecked)
    return [*found.warnings, *found.unchecked]
