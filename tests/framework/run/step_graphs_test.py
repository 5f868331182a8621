"""The graphs of a step for estimates: as many towers and threads as the execution has."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from priced_graphs import graph

from tekso.framework import ops
from tekso.framework.costs import graph_memory, this_machine
from tekso.framework.costs.this_machine import ThisMachine
from tekso.framework.execution import DataParallel, ExecutionError
from tekso.framework.initializers import Zeros
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.run import step_graphs
from tekso.framework.schedules import Constant
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm

SPEED = this_machine.only(op_s=1e-3)
MACHINE = ThisMachine(SPEED, SPEED, SPEED, call_s=0.0, array_s=0.0, variable_s=0.0)
BATCH: Signature = {"x": ((4, 3), "float32")}


class Normalised(Task):
    """Batch statistics of the batch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(float(batch["x"].shape[0]))

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        y = self.norm.fprop(theta.norm, batch["x"], ctx)
        return LossSums(tf.reduce_sum(tf.square(y - 1)))


def traced(
    task: type[Task] = Normalised,
    batch: Signature = BATCH,
    *,
    devices: int = 1,
    **execution: Any,
) -> step_graphs.StepGraphs:
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    step = Step(task.Params().instantiate(), learner.instantiate(), seed=0)
    return step_graphs.trace(step, batch, DataParallel.Params(**execution), devices=devices)


@pytest.mark.parametrize(("towers", "threads"), [(None, True), (2, False)])
def test_towers_that_sum_over_each_other_have_a_core_each(
    towers: int | None, threads: bool
) -> None:
    graphs = traced(towers=towers, xla="none")
    assert (graphs.towers, graphs.uses_all_threads) == (towers or 1, threads)


class Compared(Task):
    """Compares each row with the sum of all rows of the global batch, counted by their weights."""

    couples_examples = gathers_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [3, 5], dims=(None, None), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(float(batch["x"].shape[0]))

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        rows = batch["x"] @ theta.w
        total = ops.sum_over_replicas(ctx, tf.reduce_sum(rows, 0), self)
        count = ops.sum_over_replicas(ctx, tf.reduce_sum(batch["x"][:, 0]), self)
        return LossSums(tf.reduce_sum(rows * total / count))


def test_devices_sum_what_the_loss_sums_and_its_gradient() -> None:
    """The batch, and so the count, has no gradient."""
    assert sorted(traced(Compared, devices=2).sums) == [4, 4 * 5, 4 * 5]
    # Count, sum and squares; in the backward pass two sums, without gradients of their own.
    assert sorted(traced(Normalised, devices=2).sums) == [4, *[4 * 3] * 4]
    assert traced(Compared).sums == ()


class Product(Task):
    """A product of the batch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [3, 5], dims=(None, None), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(float(batch["x"].shape[0]))

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        return LossSums(tf.reduce_sum(batch["x"] @ theta.w))


def test_the_gradient_of_a_batch_does_not_count() -> None:
    found = traced(Product, {"x": ((40, 30, 3), "float32")}, towers=1)
    product = 2 * 40 * 30 * 3 * 5
    # The product and the gradient of its weight, and elementwise ops of its result, such as sums.
    assert 2 * product <= found.flops() < 2.7 * product


def test_a_step_that_no_execution_runs_has_no_graphs() -> None:
    with pytest.raises(ExecutionError, match=r"compiled as a whole.*execution.towers=1"):
        traced(towers=2, xla="step")


def of_one_weight(towers: int, parts: int) -> step_graphs.StepGraphs:
    """Returns graphs whose gradients are a weight of 4 KiB each, and an update without a copy."""
    mean: Any = {
        1: lambda w, a, n: (w - 0.5 * a, n + 1.0),
        2: lambda w, a, b, n: (w - 0.5 * (a + b), n + 1.0),
    }[towers]
    update = graph(mean, *[[1024]] * (1 + towers), [])
    return step_graphs.StepGraphs(
        towers, parts, graph(tf.exp, [1024]), update, [4096.0],
        variables=1, arrays=1, uses_all_threads=False,
    )  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("towers", [1, 2])
def test_a_step_needs_the_gradients_of_all_towers_and_of_one_more_part(
    towers: int, parts: int
) -> None:
    """The update writes over a gradient, and the new weight replaces the old one."""
    of_parts = towers if parts == 1 else 2 * towers
    graphs = of_one_weight(towers, parts)
    # The learner's counter of 4 bytes has a piece of 256.
    assert graphs.peak_bytes([4096.0], MACHINE) == pytest.approx(4096 * of_parts, abs=256)
    assert graphs.peak_bytes([4096.0], MACHINE, least=4097) == 0


def test_gradients_of_two_weights_may_be_one_tensor() -> None:
    """As of two vectors that are added; the update writes over both."""

    def tower(x: tf.Tensor) -> Any:
        gradient = tf.exp(x)
        return gradient, tf.identity(gradient)

    def update(v: tf.Tensor, w: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> Any:
        return v - 0.5 * a, w - 0.5 * b

    graphs = step_graphs.StepGraphs(
        1, 1, graph(tower, [1024]), graph(update, *[[1024]] * 4), [4096.0, 4096.0],
        variables=2, arrays=1, uses_all_threads=False,
    )  # fmt: skip
    assert graphs.peak_bytes([4096.0, 4096.0], MACHINE) == 2 * 4096


def test_the_memory_contains_what_the_allocator_cannot_use() -> None:
    """The next array does not fit into the pieces that others left."""
    sizes = [n << 16 for n in (40, 23, 31, 13, 37, 19, 29, 17, 41, 11)]

    def tower(x: tf.Tensor) -> Any:
        kept = [tf.exp(x[:size]) for size in sizes]
        total = tf.add_n([one[0] for one in kept])
        return [tf.reduce_sum(tf.square(one) * total) for one in reversed(kept)]

    graphs = step_graphs.StepGraphs(
        1, 1, graph(tower, [max(sizes)]), graph(lambda w: w * 0.5, [1024]), [],
        variables=1, arrays=1, uses_all_threads=False,
    )  # fmt: skip
    asked = graph_memory.peak_bytes(graphs.tower)
    assert 1.01 * asked < graphs.peak_bytes([4096.0], MACHINE) < 2.0 * asked


def test_an_update_hands_on_what_it_keeps() -> None:
    """It copies no weight and no slot, whether the step is applied or not."""
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))
    step = Step(Normalised.Params().instantiate(), learner.instantiate(), seed=0)
    graphs = step_graphs.trace(step, BATCH, DataParallel.Params(xla="none"))
    types = [op.type for op in graphs.update.get_operations()]
    assert types.count("Select") == 2 + 4 + 2  # weights, moments, statistics


def test_an_update_begins_when_all_gradients_exist() -> None:
    """A decayed slot needs no gradient: computed before, it would stay in memory during a step."""
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))
    step = Step(Normalised.Params().instantiate(), learner.instantiate(), seed=0)
    graphs = step_graphs.trace(step, BATCH, DataParallel.Params(xla="none"))
    inputs = graphs.update.inputs
    gradients = {t.op.name for t in inputs[graphs.variables :][:2]}  # of the scale and the bias
    products = [
        op
        for op in graphs.update.get_operations()
        if op.type == "Mul" and any("moment" in t.name for t in op.inputs)
    ]
    assert len(products) == 2 * 2  # the decayed slots of both weights
    for op in products:
        assert gradients <= ancestors(op)


def ancestors(op: Any) -> set[str]:
    found, left = set(), [op]
    while left:
        for before in [*(t.op for t in left[-1].inputs), *left.pop().control_inputs]:
            if before.name not in found:
                found.add(before.name)
                left.append(before)
    return found
