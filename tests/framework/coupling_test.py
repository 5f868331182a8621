"""A task that couples examples and has its own updated_statistics, as MoCo does."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from coupled_losses import Gathered
from wrong_losses import OnHost, Points

from tekso.framework import coupling
from tekso.framework.context import StepContext
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline import piece_coupling
from tekso.framework.initializers import Normal, Zeros
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import divided_losses, loss_check
from tekso.framework.run.divided_losses import Division
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task


class Queue(Gathered):
    """Has state of its own that steps change, as a queue of keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        init = Normal.Params(stddev=1.0)
        self.weight("queue", [5], dims=(None,), init=init, trainable=False)

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        if ctx.is_training:
            rows = batch["x"] @ theta.w
            ctx.collect_statistic(self, "queue", tf.reduce_sum(rows, 0), float(rows.shape[0]))
        return super().loss(theta, batch, ctx)

    def updated_statistics(self, theta: Any, statistics: Any) -> dict[str, tf.Tensor]:
        return {"queue": statistics["queue"]}


def test_a_task_with_state_of_its_own_may_couple_examples() -> None:
    task = Queue.Params().instantiate()
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {"input": Points.Params(batch_size=7).instantiate()}
    found = loss_check.check(task, learner.instantiate(), OnHost(task), inputs)
    assert not found.unchecked
    assert not [line for line in found.warnings if "does not depend on" not in line]


def test_state_of_a_task_does_not_stand_for_batch_statistics() -> None:
    task = Queue.Params().instantiate()
    assert divided_losses.couples(task)
    with pytest.raises(ExecutionError, match=r"^the task \(Queue\) couples the examples"):
        piece_coupling.check_layers(task)


def test_a_gather_of_a_task_with_state_is_none_over_accumulation_steps() -> None:
    task = Queue.Params().instantiate()
    trial = loss_check.Trial(task, loss_check.trial_weights(task, OnHost(task)))
    batch = Points.Params(batch_size=6, order="once").instantiate().batch(0)
    assert divided_losses.problem([trial], batch, division=Division(2), mode="train") == ""
    text = divided_losses.problem([trial], batch, division=Division(1, 2), mode="train")
    assert "in two parts with 3 examples each" in text


UPDATES: dict[str, Any] = {}
"""{name of a class: its `updated_statistics`}."""


class Inner(Layer):
    """Has two weights that its statistics change."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name in ("a", "b"):
            self.weight(name, [2], dims=(None,), init=Zeros.Params(), trainable=False)

    def updated_statistics(self, theta: Any, statistics: Any) -> dict[str, tf.Tensor]:
        found: dict[str, tf.Tensor] = UPDATES["Inner"](theta)
        return found


class Outer(Task):
    """Has a weight that its statistics change, and a layer with such weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("inner", Inner.Params())
        self.weight("c", [2], dims=(None,), init=Zeros.Params(), trainable=False)

    def updated_statistics(self, theta: Any, statistics: Any) -> dict[str, tf.Tensor]:
        found: dict[str, tf.Tensor] = UPDATES["Outer"](theta)
        return found


@pytest.mark.parametrize(
    ("layer", "update", "error", "message"),
    [
        (
            "Inner",
            lambda theta: {"a": theta.b},
            ExecutionError,
            r"^inner \(Inner\).*'inner/b'",
        ),
        (
            "Inner",
            lambda theta: {"b": theta.a},
            ExecutionError,
            r"^inner \(Inner\).*'inner/b'",
        ),
        (
            "Outer",
            lambda theta: {"c": theta.inner["b"]},
            ExecutionError,
            r"^the task \(Outer\)",
        ),
        ("Inner", lambda theta: {"a": theta.c}, AttributeError, r"^theta has no 'c'"),
        ("Inner", lambda theta: {"a": {}["b"]}, KeyError, r"^'b'$"),
    ],
)
def test_only_the_layer_that_lacks_a_weight_of_another_stage_is_named(
    layer: str, update: Any, error: type[Exception], message: str
) -> None:
    UPDATES.update(Inner=lambda theta: {"a": theta.a}, Outer=lambda theta: {"c": theta.c})
    task = Outer.Params().instantiate()
    weights = {path: tf.zeros([2]) for path in ("inner/a", "c")}

    def new_values() -> list[tf.Tensor]:
        with coupling.weights_elsewhere(task, weights, weights):
            return [weights[path] for path in task.new_statistics(weights, weights)]

    assert len(new_values()) == 2
    UPDATES[layer] = update
    with pytest.raises(error, match=message):
        new_values()
