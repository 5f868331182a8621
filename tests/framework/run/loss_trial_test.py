"""The trial of a task: its repetitions, its loops, and rounding and overflow of small types.

float16 has 11 bits, and no number above 65,504.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from wrong_losses import Points, Squares

from tekso.framework.context import StepContext
from tekso.framework.initializers import Ones
from tekso.framework.input.input import ExampleInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.run import loss_check
from tekso.framework.run.loss_causes import LossError
from tekso.framework.run.loss_trial import Trial, different_repetition
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import flatten

TERMS = 10  # of the loss of an example


class Rows(ExampleInput):
    """One example of large numbers, and five of small ones."""

    @property
    def num_examples(self) -> int:
        return 6

    def examples(self, index: Any, epoch: Any) -> Any:
        rows = np.ones([6, TERMS], np.float32)
        rows[0] = [2048] + [0] * (TERMS - 1)
        return {"x": rows[index], "weights": np.ones(len(index), np.float32)}


class OneByOne(Task):
    """Adds up its terms one by one, in the type of its weight."""

    class Params(Task.Params):
        """Params of OneByOne."""

        way: str = param("What is wrong.", default="nothing")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [1], dims=[None], init=Ones.Params())
        self.calls = 0

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        terms = tf.cast(batch["x"] * batch["weights"][:, None], theta.w.dtype)
        loss_sum = tf.cumsum(tf.reshape(terms * theta.w, [-1]))[-1]
        if self.params.way == "mean":
            loss_sum /= terms.shape[0]
        if self.params.way == "penalty":
            loss_sum += tf.cast(0.05 * 2048, theta.w.dtype) * theta.w[0]
        if self.params.way == "counts its calls":
            self.calls += 1
            loss_sum += tf.cast(300.0 * self.calls, theta.w.dtype)
        return LossSums(loss_sum)


class InType:
    """A program whose weights have a type, as those that a layer receives."""

    serialize_calls = False

    def __init__(self, task: Task, dtype: str) -> None:
        cast = {path: tf.cast(w, dtype) for path, w in flatten(task.init(seed=1)).items()}
        self._theta = task.theta(cast)

    def call(self, function: Any, *inputs: Any) -> Any:
        return function(self._theta, *inputs, StepContext(mode="decode"))


def check(dtype: str, way: str = "nothing", kind: type[OneByOne] = OneByOne) -> list[str]:
    task = kind.Params(way=way).instantiate()
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    inputs = {"input": Rows.Params(batch_size=4, order="once").instantiate()}
    found = loss_check.check(task, learner.instantiate(), InType(task, dtype), inputs)
    return [*found.warnings, *found.unchecked]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rounding_of_the_type_of_the_weights_is_no_error(dtype: str) -> None:
    # In float16, 2048 + 1 is 2048: the loss of three examples is 1 % less than that of two parts.
    terms = tf.cast([2048.0] + 20 * [1.0], dtype)
    assert float(tf.cumsum(terms)[-1]) == (2048 if dtype == "float16" else 2068)
    assert check(dtype) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("way", ["mean", "penalty"])
def test_a_loss_that_is_no_sum_is_refused_in_every_type(way: str, dtype: str) -> None:
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch: for 3"):
        check(dtype, way)


class OnePercent(OneByOne):
    """Adds a penalty of a percent of the loss."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        found = super().loss(theta, batch, ctx).loss_sum
        return LossSums(found + tf.cast(20.0, found.dtype) * theta.w[0])


def test_what_16_bits_would_explain_is_an_error_in_float32() -> None:
    with pytest.raises(LossError, match=r"for 3 examples together it is 2088, and .* 2068 and 40"):
        check("float32", kind=OnePercent)
    assert check("float16", kind=OnePercent) == []


class Large(OneByOne):
    """Has a loss of 61,440 and losses of 4,000: together, they are infinite in float16."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = tf.where(batch["x"] == 1, 400.0, 30.0 * batch["x"])
        return super().loss(theta, {**batch, "x": x}, ctx)


def test_a_sum_that_overflows_where_its_parts_do_not_is_no_error() -> None:
    assert check("float16", kind=Large) == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loss_that_differs_each_time_is_named_as_such_in_every_type(dtype: str) -> None:
    with pytest.raises(LossError, match=r"^OneByOne computes a different loss each time"):
        check(dtype, "counts its calls")


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ([4.0, 4.0, 4.0], None),
        ([4.001, 3.999, 4.0], None),
        ([4.02], 4.02),
        ([5.0], 5.0),
        ([4.0, 4.001, 3.9], 3.9),  # by chance, the first two are almost the same
    ],
)
def test_a_difference_is_not_random_if_repetitions_have_almost_none(
    again: list[float], expected: float | None
) -> None:
    values = iter(again)
    assert different_repetition(4.0, 5.0, values) == expected
    assert next(values, None) is None
    assert different_repetition(4.0, float("nan"), again) is None
    assert np.isnan(different_repetition(4.0, 5.0, [float("nan")]) or 0.0)


@pytest.mark.parametrize(("way", "iterations"), [("loop", 6), ("long loop", 101)])
def test_a_long_loop_is_computed_once_and_then_traced_once(way: str, iterations: int) -> None:
    task = Squares.Params(way=way).instantiate()
    trial = Trial(task, flatten(task.init(seed=1)))
    batch = Points.Params(batch_size=4).instantiate().batch(0)
    first, second, third = (trial.sums(batch) for _ in range(3))
    assert second == third
    assert first.loss == pytest.approx(second.loss, rel=1e-6)  # another order of sums
    assert task.iterations == iterations  # a trace is one, a computation 2 or 100


def test_a_traced_loss_leaves_the_graph_optimizer_as_it_was() -> None:
    name, options = "disable_meta_optimizer", tf.config.optimizer
    task = Squares.Params(way="long loop").instantiate()
    batch = Points.Params(batch_size=4).instantiate().batch(0)
    before = options.get_experimental_options().get(name, False)
    try:
        for is_off in (True, False):
            options.set_experimental_options({name: is_off})
            trial = Trial(task, flatten(task.init(seed=1)))
            assert trial.sums(batch).loss == pytest.approx(trial.sums(batch).loss, rel=1e-6)
            assert options.get_experimental_options()[name] == is_off
    finally:
        options.set_experimental_options({name: before})


def test_traces_for_batches_of_other_sizes_are_no_retracing_that_tensorflow_warns_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: warned.append(text))
    task = Squares.Params(way="long loop").instantiate()
    trial = Trial(task, flatten(task.init(seed=1)))
    batch = Points.Params(batch_size=9).instantiate().batch(0)
    for size in range(1, 10):
        some = {name: array[:size] for name, array in batch.items()}
        assert trial.sums(some) == trial.sums(some)
    assert task.iterations == 100 + 9  # once op by op, and a trace for each size
    assert warned == []
