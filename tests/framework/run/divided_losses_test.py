"""Losses that couple examples: devices that compute parts of a batch must have the same loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from wrong_losses import OnHost, Points

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, MeshSharded
from tekso.framework.experiment import Tree
from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import divided_losses, divided_plan, loss_check
from tekso.framework.run.loss_sums import LossError
from tekso.framework.run.loss_trial import Trial
from tekso.framework.schedules import Constant
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


class Triplets(InBatch):
    """Compares each example only with its two neighbours; batches of others have no triplets."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = tf.reshape(batch["x"] @ theta.w, [-1, 3, 5])
        return LossSums(tf.reduce_sum(tf.square(tf.reduce_sum(z, 1))))


class Random(InBatch):
    """Draws numbers that do not repeat."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        sums = super().loss(theta, batch, ctx)
        return LossSums(sums.loss_sum * (1 + np.random.default_rng().uniform()))


class FailsInOne(InBatch):
    """Raises an error on the first device, while the other one waits for a sum."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        if ctx.example_offset == 0 and batch["x"].shape[0] < ctx.num_examples:
            raise ArithmeticError("the first device")
        return super().loss(theta, batch, ctx)


class SumsInOne(InBatch):
    """Sums over the devices on the first of them only."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        found = super().loss(theta, batch, ctx)
        if ctx.example_offset == 0 and batch["x"].shape[0] < ctx.num_examples:
            ops.sum_over_replicas(ctx, batch["x"], self)
        return found


def trial(kind: type[Task]) -> Trial:
    task = kind.Params().instantiate()
    return Trial(task, OnHost(task).call(lambda theta, _: loss_check.flatten(theta)))


BATCH = Points.Params(batch_size=6, order="once").instantiate().batch(0)


def problem(kind: type[Task], devices: int = 2, mode: Any = "train") -> str:
    return divided_losses.problem(trial(kind), BATCH, devices=devices, mode=mode)


@pytest.mark.parametrize(("mode", "when"), [("train", "training"), ("eval", "evaluation")])
def test_a_softmax_over_the_examples_of_a_device_is_a_problem(mode: str, when: str) -> None:
    text = problem(InBatch, mode=mode)
    assert text.startswith("InBatch.loss (")
    assert f"in {when}, the first 6 examples have a loss sum of" in text
    assert (
        "on two with 3 examples each. Each device has only a part of the batch, and the task (In"
        in text
    )
    assert "Set gathers_examples = True there" in text and "ctx.example_offset" in text
    assert problem(InBatch, devices=7, mode=mode) == ""  # the program rejects it


def test_the_losses_in_the_message_are_those_of_one_device_and_of_its_parts() -> None:
    one, apart = (
        float(problem(InBatch).split(word)[1].split()[0].rstrip(","))
        for word in ("loss sum of ", "and of ")
    )
    task = trial(InBatch)
    ctx = StepContext(mode="train", num_examples=6)
    batch = {name: tf.constant(array) for name, array in BATCH.items()}
    theta = task.task.theta(task.weights)
    assert one == pytest.approx(float(task.task.loss(theta, batch, ctx).loss_sum), rel=1e-4)
    assert apart < one  # fewer examples to choose from


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_softmax_over_the_examples_of_all_devices_is_none(mode: str) -> None:
    assert problem(Gathered, mode=mode) == ""
    assert "Misplaced" in problem(Misplaced, mode=mode)


def test_groups_of_examples_that_no_device_divides_are_none() -> None:
    assert problem(Triplets) == ""
    with pytest.raises(tf.errors.InvalidArgumentError, match="reshape"):
        problem(Triplets, devices=3)  # 2 examples a device


def test_a_loss_that_differs_each_time_is_not_taken_for_one() -> None:
    assert problem(Random) == ""


def test_the_error_of_one_device_is_raised_and_the_other_does_not_wait() -> None:
    with pytest.raises(ArithmeticError, match="the first device"):
        problem(FailsInOne)


def test_a_device_that_sums_alone_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(LossError, match="one of two devices sums over the devices"):
        problem(SumsInOne)


class Normalised(Task):
    """Couples examples by batch statistics only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))


def test_only_couplings_other_than_statistics_are_checked() -> None:
    assert not divided_losses.couples(Normalised.Params().instantiate())
    assert divided_losses.couples(InBatch.Params().instantiate())
    assert isinstance(InBatch.Params().instantiate(), Layer)


def check(kind: type[Task], *, is_new: bool, devices: int = 2, trains: bool = True) -> None:
    task = kind.Params().instantiate()
    params = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {
        "input": Points.Params(batch_size=6).instantiate(),
        "eval_inputs.dev": Points.Params(batch_size=7, order="once").instantiate(),
    }
    if is_new:
        found = loss_check.check(task, params.instantiate(), OnHost(task), inputs, devices=devices)
    else:
        found = loss_check.check_restored(
            task, OnHost(task), inputs, devices=devices, trains=trains
        )
    assert found.unchecked == []


class OnlyInTraining(InBatch):
    """Couples no examples in evaluation."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        if ctx.is_training:
            return super().loss(theta, batch, ctx)
        return LossSums(tf.reduce_sum(batch["weights"] * tf.square(batch["x"] @ theta.w)[:, 0]))


@pytest.mark.parametrize("is_new", [True, False])
def test_new_and_resumed_runs_are_refused(is_new: bool) -> None:
    with pytest.raises(LossError, match="in training, the first 6"):
        check(OnlyInTraining, is_new=is_new)
    check(Gathered, is_new=is_new)
    check(OnlyInTraining, is_new=is_new, devices=1)


def test_an_evaluation_is_refused_only_if_it_differs() -> None:
    check(OnlyInTraining, is_new=False, trains=False)
    with pytest.raises(LossError, match="in evaluation, the first 6"):
        check(InBatch, is_new=False, trains=False)


def test_a_task_too_large_to_check_has_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check, "MOST_BYTES", 1)
    task = InBatch.Params().instantiate()
    (text,) = loss_check.check_restored(task, OnHost(task), {}, devices=2).warnings
    assert text.startswith("InBatch couples the examples of a batch, and is too large to check")
    assert loss_check.check_restored(task, OnHost(task), {}, devices=1).warnings == []


def tree(kind: type[Task], **changes: Any) -> Any:
    found = Tree.Params(
        task=kind.Params(),
        input=Points.Params(batch_size=6),
        execution=DataParallel.Params(),
    )
    return found.set(changes)


def test_a_plan_of_several_devices_has_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    task = InBatch.Params().instantiate()
    found = divided_plan.find(tree(InBatch), task, 2, assets_dir=None)
    assert "in training, the first 6 examples have a loss sum of" in found.problem
    one = divided_plan.find(tree(InBatch), task, 1, assets_dir=None)
    meshes = tree(InBatch, execution=MeshSharded.Params())
    assert one == divided_plan.find(meshes, task, 2, assets_dir=None) == divided_plan.DividedStep()
    gathered = Gathered.Params().instantiate()
    assert (
        divided_plan.find(tree(Gathered), gathered, 2, assets_dir=None)
        == divided_plan.DividedStep()
    )
    monkeypatch.setattr(Points, "batch", lambda *_: 1 / 0)
    found = divided_plan.find(tree(InBatch), task, 2, assets_dir=None)
    assert found.problem == ""
    assert found.warnings == ("InBatch could not be checked on 2 devices: division by zero",)
    monkeypatch.setattr(loss_check, "MOST_BYTES", 1)
    (warning,) = divided_plan.find(tree(InBatch), task, 2, assets_dir=None).warnings
    assert "too large to check" in warning
