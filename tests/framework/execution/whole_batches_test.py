"""Losses over the whole batch are rejected where its parts do not exchange examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tekso.framework import ops
from tekso.framework.coupling import gathering
from tekso.framework.execution import DataParallel, ExecutionError
from tekso.framework.execution.parameter_servers import Hybrid
from tekso.framework.execution.whole_batches import check_whole
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task


class Gathering(Layer):
    """A layer that says that it compares all examples of the batch."""

    couples_examples = True
    gathers_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [1], dims=(None,), init=Ones.Params())


class Comparing(Task):
    """A task with such a layer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("layer", Gathering.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        del ctx
        return LossSums(tf.reduce_sum(batch["weights"]) * theta.layer.w[0])


BATCH = {"weights": ((4,), np.dtype(np.float32))}


def build(execution: Any, accumulation_steps: int = 1, task: Any = None) -> Any:
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=Constant.Params(value=0.1),
        accumulation_steps=accumulation_steps,
    )
    task = (task or Comparing.Params()).instantiate()
    return execution.build(task, learner.instantiate(), seed=1, batch=BATCH)


def test_one_part_is_allowed_and_several_are_an_error_that_names_the_layer() -> None:
    task = Comparing.Params().instantiate()
    assert gathering(task) == ["layer (Gathering)"]
    check_whole(task, 1, "parts", "cure")
    with pytest.raises(ExecutionError, match=r"layer \(Gathering\) compares .* 3 parts, .*: cure"):
        check_whole(task, 3, "parts", "cure")


def test_accumulation_is_rejected_and_several_processes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *_: warnings.append(text))
    execution = DataParallel.Params(towers=1, xla="none").instantiate()
    build(execution)
    assert not warnings
    with pytest.raises(ExecutionError, match=r"in 2 accumulation steps.* set learner\.accum"):
        build(execution, accumulation_steps=2)
    monkeypatch.setattr(execution, "_cluster", SimpleNamespace(process=0, size=2, num_local=1))
    assert build(execution).num_replicas == 2
    assert not warnings


class Centre(Layer):
    """Subtracts the mean of the batch, and tracks it; sums over the towers, or not."""

    class Params(Layer.Params):
        sums: bool = param("Whether it sums over the towers.", default=True)

    couples_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [1], dims=(None,), init=Ones.Params())
        self.weight("mean", [], dims=(), init=Ones.Params(), trainable=False)

    def fprop(self, theta: Any, x: tf.Tensor, ctx: Any) -> tf.Tensor:
        total, count = tf.reduce_sum(x), tf.cast(tf.size(x), tf.float32)
        ctx.collect_statistic(self, "mean", total, count)
        if self.params.sums:
            total, count = (ops.sum_over_replicas(ctx, x, self) for x in (total, count))
        return (x - total / count) * theta.w

    def updated_statistics(self, theta: Any, statistics: Any) -> Any:
        return {"mean": statistics["mean"]}


class Centred(Comparing):
    """The sum of the squares of centred values."""

    class Params(Comparing.Params):
        layer: Centre.Params = param("The layer.", default=Centre.Params())

    def __init__(self, params: Any) -> None:
        Task.__init__(self, params)
        self.child("layer", self.params.layer)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        y = self.layer.fprop(theta.layer, batch["weights"], ctx)
        return LossSums(tf.reduce_sum(tf.square(y)))


def test_statistics_that_are_not_summed_over_towers_are_rejected() -> None:
    batch = {"weights": np.array([1, 2, 3, 6], np.float32)}

    def loss(towers: int, **changes: Any) -> float:
        execution = DataParallel.Params(towers=towers, xla="none").instantiate()
        program = build(execution, task=Centred.Params().set(changes))
        program.initialize()
        return float(program.train_step(batch, 0)["loss"])

    alone = {"layer.sums": False}
    assert (
        loss(2)
        == pytest.approx(loss(1))
        == pytest.approx(loss(1, **alone))
        == pytest.approx(14 / 12)
    )
    with pytest.raises(ExecutionError, match=r"layer \(Centre\) couples .* ops\.sum_over_replicas"):
        loss(2, **alone)


class TwiceCentred(Centred):
    """A second such layer, whose values change with the order of the examples."""

    class Params(Centred.Params):
        other: Centre.Params = param("The second layer.", default=Centre.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("other", self.params.other)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = self.layer.fprop(theta.layer, batch["weights"], ctx)
        y = self.other.fprop(theta.other, x * batch["weights"], ctx)
        return LossSums(tf.reduce_sum(tf.square(y)))


@pytest.mark.parametrize("alone", ["layer", "other"])
def test_the_sums_of_another_layer_do_not_hide_statistics_that_are_not_summed(alone: str) -> None:
    execution = DataParallel.Params(towers=2, xla="none").instantiate()
    task = TwiceCentred.Params().set({f"{alone}.sums": False})
    program = build(execution, task=task)
    program.initialize()
    with pytest.raises(ExecutionError, match=rf"^{alone} \(Centre\) couples"):
        program.train_step({"weights": np.array([1, 2, 3, 6], np.float32)}, 0)


def test_an_evaluation_that_sums_over_devices_without_examples_is_rejected() -> None:
    """A device without examples computes the first one, which such a sum would count again."""
    program = build(DataParallel.Params(xla="none").instantiate(), task=Centred.Params())
    program.initialize()
    program.num_replicas = 3
    program.eval_step({"weights": np.array([1, 2, 6], np.float32)})
    with pytest.raises(ExecutionError, match=r"2 examples, but layer sums over .* 3 dev"):
        program.eval_step({"weights": np.array([1, 2], np.float32)})


def test_workers_that_divide_a_batch_are_rejected() -> None:
    updates = Hybrid.Params(workers=["a:1", "a:2"], parameter_servers=["b:1"])
    execution = DataParallel.Params(towers=1, xla="none", updates=updates).instantiate()
    with pytest.raises(ExecutionError, match="computed in 2 parts by workers"):
        build(execution)
