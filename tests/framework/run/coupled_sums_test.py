"""A loss that couples examples: it is computed equally each time, and a mean is recognised."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from coupled_losses import Gathered, InBatch
from wrong_losses import OnHost, Points

from tekso.framework.context import StepContext
from tekso.framework.initializers import Zeros
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import loss_check
from tekso.framework.run.loss_causes import LossError
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task


class Masked(Gathered):
    """Hides examples of weight 0 as SimCLR does: the weights are in the scores, too."""

    def reduced(self, weights: tf.Tensor, nats: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(weights * nats)

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = batch["x"] @ theta.w
        z += ctx.uniform(self, z.shape)
        others, start = self.others(z, ctx)
        scores = 0.1 * tf.matmul(z, others, transpose_b=True)
        scores -= 1e9 * tf.expand_dims(1.0 - batch["weights"], 0)
        place = tf.range(z.shape[0]) + tf.cast(start, tf.int32)
        nats = tf.nn.sparse_softmax_cross_entropy_with_logits(place, scores)
        return LossSums(self.reduced(batch["weights"], nats))


class OnlyMarks(Masked):
    """Reads the weights as marks of padding, which is right if they are 0 or 1."""

    def reduced(self, weights: tf.Tensor, nats: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.where(weights > 0, nats, tf.zeros_like(nats)))


class Whole(Masked):
    """A number for a whole batch, as its loss weight is."""

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def reduced(self, weights: tf.Tensor, nats: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(weights * nats) / tf.reduce_sum(weights)


class Divided(Masked):
    """Divides by the loss weight."""

    def reduced(self, weights: tf.Tensor, nats: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(weights * nats) / tf.reduce_sum(weights)


class Mean(Masked):
    """A mean over the rows."""

    def reduced(self, weights: tf.Tensor, nats: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(weights * nats)


class MeanOfTwo(InBatch):
    """A mean over the rows, which takes padding as negatives."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        return LossSums(super().loss(theta, batch, ctx).loss_sum / tf.reduce_sum(batch["weights"]))


class OfNumpy(Masked):
    """Draws random numbers of NumPy in training."""

    def factor(self) -> float:
        return float(np.random.default_rng().uniform(0.5, 1.5))

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        factor = self.factor() if ctx.is_training else 1.0
        return super().loss(theta, {**batch, "x": batch["x"] * factor}, ctx)


class Cancels(OfNumpy):
    """Adds a large number and subtracts it, with other rounding errors each time."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        sums = Masked.loss(self, theta, batch, ctx)
        large = tf.constant([1e4, -1e4]) * np.random.default_rng().uniform(1, 1 + 1e-6, 2)
        return LossSums(0.01 * sums.loss_sum + tf.reduce_sum(large))


class CancelsTraced(Cancels):
    """Computes the large number in a traced function."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        sums = Masked.loss(self, theta, batch, ctx)
        large = tf.constant([1e3, -1e3]) * np.random.default_rng().uniform(1, 1 + 1e-6, 2)
        traced = tf.function(lambda one, x: one + tf.reduce_sum(x), autograph=False)
        return LossSums(traced(sums.loss_sum, large))


class Reports(OfNumpy):
    """Reports the mean of scores that are masked by a large number."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        loss_sum = super().loss(theta, batch, ctx).loss_sum
        total = tf.reduce_sum(batch["weights"] * (batch["x"][:, 0] - 1e9))
        return LossSums(loss_sum, {"score": (total, tf.reduce_sum(batch["weights"]))})


class Traced(OfNumpy):
    """Computes its loss in a traced function."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        loss_sum = super().loss(theta, batch, ctx).loss_sum
        return LossSums(tf.function(tf.identity, autograph=False)(loss_sum))


class OfPython(OfNumpy):
    """Draws random numbers of Python."""

    def factor(self) -> float:
        return random.uniform(0.5, 1.5)


class OfEvaluation(OfNumpy):
    """Draws random numbers outside of training, as if batch statistics hid them in training."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        factor = 1.0 if ctx.is_training else self.factor()
        return Masked.loss(self, theta, {**batch, "x": batch["x"] * factor}, ctx)


class Counts(OfNumpy):
    """Counts its calls."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1.0 + 0.01 * self.calls


class Scales(Counts):
    """Counts its calls by the scale of its inputs, which a bias of 0 hides."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("bias", [5], dims=(None,), init=Zeros.Params())

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = batch["x"] * self.factor()
        z = tf.math.l2_normalize(x @ theta.w + theta.bias, 1)
        scores = tf.matmul(z, z, transpose_b=True)
        nats = -tf.linalg.diag_part(tf.nn.log_softmax(scores))
        return LossSums(tf.reduce_sum(batch["weights"] * nats))


class Bank(Masked):
    """Keeps a tensor in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.bank: Any = np.zeros([12, 5], np.float32)

    def others(self, z: tf.Tensor, ctx: StepContext) -> tuple[tf.Tensor, Any]:
        others, start = super().others(z, ctx)
        self.bank = tf.concat([self.bank, z], 0)[-12:]
        return others * (1 + tf.reduce_mean(self.bank)), start


def check(kind: type[Task]) -> list[str]:
    task = kind.Params().instantiate()
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {"input": Points.Params(batch_size=7).instantiate()}
    found = loss_check.check(task, learner.instantiate(), OnHost(task), inputs)
    assert not found.unchecked
    return [line for line in found.warnings if "does not depend on" not in line]


@pytest.mark.parametrize("kind", [InBatch, Gathered, Masked, OnlyMarks, Whole])
def test_right_losses_have_no_warning(kind: type[Task]) -> None:
    assert check(kind) == []


@pytest.mark.parametrize("kind", [Cancels, CancelsTraced])
def test_rounding_errors_of_large_terms_are_no_random_numbers(kind: type[Task]) -> None:
    """They are more than rounding errors of the loss, in which the large terms cancel."""
    assert check(kind) == []


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Divided, "with all weights of 7 examples doubled, loss_weight doubles"),
        (MeanOfTwo, "with all weights of 7 examples doubled, loss_weight doubles"),
        (Mean, "with 7 more examples of weight 0"),
    ],
)
def test_a_mean_is_a_warning(kind: type[Task], how: str) -> None:
    (line,) = check(kind)
    assert line.startswith(f"{kind.__name__}.loss (")
    assert f"seems to return a mean over the examples: {how}" in line
    assert "Return the sum (tf.reduce_sum, not tf.reduce_mean)" in line


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (OfNumpy, "a layer or the task uses tf.random, np.random, Python's random"),
        (Reports, "a layer or the task uses tf.random, np.random, Python's random"),
        (Traced, "a layer or the task uses tf.random, np.random, Python's random"),
        (OfPython, "a layer or the task uses tf.random, np.random, Python's random"),
        (OfEvaluation, "a layer or the task uses tf.random, np.random, Python's random"),
        (Counts, r"each call changes Counts\.calls"),
        (Scales, r"each call changes Scales\.calls"),
        (Bank, r"each call changes Bank\.bank"),
    ],
)
def test_a_loss_that_differs_each_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[Task], cause: str
) -> None:
    # Otherwise, two draws are sometimes nearly equal.
    random.seed(0)
    new, seeded = np.random.default_rng, np.random.default_rng(0)
    monkeypatch.setattr(np.random, "default_rng", lambda *seed: new(*seed) if seed else seeded)
    what = rf"^{kind.__name__} computes a different loss each time for the same .*{cause}"
    with pytest.raises(LossError, match=what):
        check(kind)
