"""Losses that couple examples: parts of a batch must have the loss of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from coupled_losses import Gathered, InBatch, Misplaced
from wrong_losses import OnHost, Points

from tekso.framework import initializers, ops
from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, Hybrid, MeshSharded
from tekso.framework.experiment import Experiment
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import Params
from tekso.framework.run import divided_losses, loss_check
from tekso.framework.run.divided_losses import Division
from tekso.framework.run.loss_causes import LossError
from tekso.framework.run.loss_trial import Trial
from tekso.framework.run.session import Session
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm


class Triplets(InBatch):
    """Compares each example only with its two neighbours; batches of others have no triplets."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = tf.reshape(batch["x"] @ theta.w, [-1, 3, 5])
        return LossSums(tf.reduce_sum(tf.square(tf.reduce_sum(z, 1))))


class Pairs(InBatch):
    """Adds the sum of each pair to its examples; one without the other is a pair of its own."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = batch["x"] @ theta.w
        others = tf.reshape(z, [-1, 2 if z.shape[0] % 2 == 0 else 1, 5])
        return LossSums(tf.reduce_sum(tf.square(tf.reduce_sum(others, 1))))


class GroupsOfStatistics(Triplets):
    """The same, after a normalization by batch statistics."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = self.norm.fprop(theta.norm, batch["x"], ctx)
        return super().loss(theta, {**batch, "x": x}, ctx)


class SummedOnly(InBatch):
    """Compares each example with the mean of the batch, which it does not gather."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = batch["x"] @ theta.w
        mean = ops.sum_over_replicas(ctx, tf.reduce_sum(z, 0), self) / ctx.num_examples
        return LossSums(tf.reduce_sum(tf.square(z - mean)))


class Hidden(InBatch):
    """Compares each example with the mean of those at hand, times weights that are 0 at first."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("scale", [5], dims=(None,), init=initializers.Constant.Params(value=0.0))

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = batch["x"] @ theta.w
        return LossSums(tf.reduce_sum(tf.square(z - theta.scale * tf.reduce_mean(z, 0))))


class SharedDraws(InBatch):
    """Adds the same random numbers to all examples."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        z = batch["x"] @ theta.w + ctx.uniform(self, [5], shared=True)
        return LossSums(tf.reduce_sum(tf.square(z)))


class InThrees(InBatch):
    """Has an error for a number of examples that 3 does not divide."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = tf.reshape(tf.reshape(batch["x"], [-1, 3, 3]), [-1, 3])
        return super().loss(theta, {**batch, "x": x}, ctx)


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


def problem(kind: type[Task], devices: int = 2, mode: Any = "train", parts: int = 1) -> str:
    division = Division(devices, parts)
    return divided_losses.problem([trial(kind)], BATCH, division=division, mode=mode)


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


def test_a_softmax_over_the_examples_of_an_accumulation_step_is_a_problem() -> None:
    text = problem(InBatch, devices=1, parts=2)
    assert "depends on the number of parts of a batch: in training, the first 6 examples" in text
    assert "in two parts with 3 examples each. The parts (accumulation steps, or workers" in text
    assert "but the examples of a batch are coupled by the task (InBatch). Set learner." in text
    assert problem(InBatch, devices=1, parts=2, mode="eval") == ""  # computed as a whole
    assert problem(InBatch, devices=1, parts=7) == ""  # the program rejects it


def test_neither_statistics_nor_whole_groups_are_a_problem_of_accumulation_steps() -> None:
    assert problem(GroupsOfStatistics, devices=1, parts=2) == ""
    with pytest.raises(tf.errors.InvalidArgumentError, match="reshape"):
        problem(GroupsOfStatistics, devices=1, parts=3)  # 2 examples a part


def test_parts_are_as_large_as_in_training() -> None:
    """Four accumulation steps of 6 examples are three of 2: pairs stay together."""
    assert problem(Pairs, devices=1, parts=4) == ""
    assert "in two parts with 1 example each" in problem(Pairs, devices=1, parts=6)


def test_sums_over_devices_are_none_over_accumulation_steps() -> None:
    assert problem(SummedOnly) == ""
    assert "in two parts with 3 examples each" in problem(SummedOnly, devices=1, parts=2)


class Normalised(Task):
    """Couples examples by batch statistics only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))


def test_only_couplings_other_than_statistics_are_checked() -> None:
    assert not divided_losses.couples(Normalised.Params().instantiate())
    assert divided_losses.couples(InBatch.Params().instantiate())
    assert isinstance(InBatch.Params().instantiate(), Layer)


def check(
    kind: type[Task], *, is_new: bool, devices: int = 2, parts: int = 1, trains: bool = True
) -> None:
    task = kind.Params().instantiate()
    params = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {
        "input": Points.Params(batch_size=6).instantiate(),
        "eval_inputs.dev": Points.Params(batch_size=7, order="once").instantiate(),
    }
    own: Any = {"division": Division(devices, parts)}
    if is_new:
        found = loss_check.check(task, params.instantiate(), OnHost(task), inputs, **own)
    else:
        found = loss_check.check_restored(task, OnHost(task), inputs, trains=trains, **own)
    assert found.unchecked == []


class OfExamples(Experiment):
    """A task that couples the examples of a batch."""

    def task(self) -> Params:
        return InBatch.Params()

    def input(self) -> Params:
        return Points.Params(batch_size=6)

    def learner(self) -> Params:
        return Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))


def test_a_run_with_accumulation_steps_is_refused() -> None:
    with pytest.raises(LossError, match="in two parts with 3 examples each"):
        Session(OfExamples, {"learner.accumulation_steps": 2, "execution.xla": "none"}).train(1)


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
    with pytest.raises(LossError, match=r"in training, the first 6 .* in two parts with 3"):
        check(OnlyInTraining, is_new=is_new, devices=1, parts=2)


@pytest.mark.parametrize("is_new", [True, False])
def test_weights_that_are_0_hide_no_coupling(is_new: bool) -> None:
    assert problem(Hidden) == ""
    with pytest.raises(LossError, match="in training, the first 6"):
        check(Hidden, is_new=is_new)


class Overflows(Hidden):
    """Compares the examples at hand, and has an infinite loss for weights that are not 0."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        added = tf.where(tf.reduce_any(theta.scale != 0.0), np.inf, 0.0)
        return LossSums(InBatch.loss(self, theta, batch, ctx).loss_sum + added)


def test_numbers_in_place_of_0_hide_no_coupling() -> None:
    with pytest.raises(LossError, match="in training, the first 6"):
        check(Overflows, is_new=False)


class Unchanged(Hidden):
    """Has weights that are 0, and compares no examples."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        return LossSums(tf.reduce_sum(batch["x"] @ theta.w + theta.scale))


def test_parts_are_computed_once_if_weights_are_0(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, before = [], divided_losses._of_two_parts
    monkeypatch.setattr(
        divided_losses, "_of_two_parts", lambda *args: computed.append(args) or before(*args)
    )
    check(Unchanged, is_new=False)
    assert len(computed) == 2  # of the training input, and of the evaluation


def test_a_task_that_cannot_compute_a_few_examples_is_refused_for_its_parts() -> None:
    with pytest.raises(LossError, match="in training, the first 6"):
        check(InThrees, is_new=True)


class Fails(InBatch):
    """Has an error on two devices."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        if batch["x"].shape[0] < (ctx.num_examples or 0):
            raise ArithmeticError("no parts")
        return super().loss(theta, batch, ctx)


def test_an_error_of_the_parts_alone_is_no_error_of_a_few_examples() -> None:
    task = Fails.Params().instantiate()
    inputs = {"input": Points.Params(batch_size=6).instantiate()}
    found = loss_check.check_restored(task, OnHost(task), inputs, division=Division(2))
    (text,) = found.unchecked
    assert text.endswith("whether the loss of Fails on 2 devices equals that of one: no parts")


def test_an_error_before_any_loss_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    task = InBatch.Params().instantiate()
    monkeypatch.setattr(loss_check, "trial_weights", lambda *_: 1 / 0)
    found = loss_check.check_restored(task, OnHost(task), {}, division=Division(2))
    (text,) = found.unchecked
    assert text.endswith("ZeroDivisionError: division by zero")


def test_random_numbers_that_all_examples_share_are_none() -> None:
    assert problem(SharedDraws) == "" == problem(SharedDraws, devices=1, parts=2)


def test_towers_of_a_device_count_as_devices() -> None:
    settings = {"task": Misplaced.Params(), "execution.towers": 2, "execution.xla": "none"}
    with pytest.raises(LossError, match=r"of .* on two with 3 examples each"):
        Session(OfExamples, settings).train(1)


def test_an_execution_divides_a_batch_over_devices_towers_workers_and_accumulation_steps() -> None:
    def division(execution: Any, accumulation: int = 1) -> Division:
        return divided_losses.division_of(execution, 3, accumulation=accumulation)

    workers = Hybrid.Params(workers=["a:1", "a:2"], parameter_servers=["b:1"])
    assert division(DataParallel.Params()) == Division(3, 1)
    assert division(DataParallel.Params(towers=2), 5) == Division(6, 5)
    assert division(DataParallel.Params(updates=workers), 5) == Division(1, 10)
    assert division(DataParallel.Params(updates=workers, towers=2)) == Division(2, 2)
    assert division(MeshSharded.Params(), 5) == Division(1, 5)


def test_an_evaluation_is_refused_only_if_it_differs() -> None:
    check(OnlyInTraining, is_new=False, trains=False)
    check(InBatch, is_new=False, devices=1, parts=2, trains=False)
    with pytest.raises(LossError, match="in evaluation, the first 6"):
        check(InBatch, is_new=False, trains=False)


def test_a_task_too_large_to_check_has_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    task = InBatch.Params().instantiate()

    def warnings(program: Any, *division: int) -> list[str]:
        return loss_check.check_restored(task, program, {}, division=Division(*division)).warnings

    program = OnHost(task)
    program.serialize_calls = True
    (text,) = warnings(program, 1, 2)
    assert text.startswith("InBatch couples the examples of a batch, and has several processes")
    monkeypatch.setattr(loss_check, "MOST_BYTES", 1)
    (text,) = warnings(OnHost(task), 2, 1)
    assert text.startswith("InBatch couples the examples of a batch, and is too large to check")
    assert text.endswith("whether its loss on 2 devices equals that of one")
    (text,) = warnings(OnHost(task), 1, 3)
    assert "in 3 parts (accumulation steps, or workers of execution.updates) equals that" in text
    assert warnings(OnHost(task), 1, 1) == []


class CouplesLarge(InBatch):
    """Couples only examples of large numbers."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        plain = tf.reduce_sum(tf.square(batch["x"] @ theta.w))
        coupled = super().loss(theta, batch, ctx).loss_sum
        return LossSums(tf.where(tf.reduce_max(batch["x"]) > 50, coupled, plain))


class Kinds(Points):
    """Has batches of two kinds; in those of the second one, numbers are large."""

    def steps_of_each_kind(self) -> list[int]:
        return [0, 1]

    def batch(self, step: int) -> Any:
        found = dict(super().batch(step))
        return {**found, "x": found["x"] * (1 + 100 * (step % 2))}


def test_batches_of_every_kind_are_compared() -> None:
    def compare(kind: type[Points]) -> None:
        inputs = {"input": kind.Params(batch_size=6).instantiate()}
        divided_losses.check(trial(CouplesLarge), inputs, division=Division(2), trains=True)

    compare(Points)
    with pytest.raises(LossError, match="in training, the first 6"):
        compare(Kinds)
