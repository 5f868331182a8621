"""Before the first step: a loss that is a mean, padding that counts, weights without a gradient."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Normal
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import ExampleInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Piece
from tekso.framework.run import loss_check
from tekso.framework.run.loss_sums import LossError
from tekso.framework.run.loss_trial import Trial, TrialSums, different_repetition
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import flatten


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
    task = kind.Params(way=way).instantiate()
    params = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {
        "input": train.Params(batch_size=4).instantiate(),
        "eval_inputs.dev": Points.Params(batch_size=4, order="once").instantiate(),
    }
    found = loss_check.check(task, params.set(learner).instantiate(), OnHost(task), inputs)
    assert bool(found.unchecked) == (way == "fixed") and not (found.warnings and found.unchecked)
    return [*found.warnings, *found.unchecked]


class InPieces(Squares):
    """Has pieces, too."""

    factor = 1.0

    def pieces(self) -> list[Piece]:
        def run(theta: Any, flow: Any, ctx: Any) -> Any:
            loss_sum = self.factor * self.loss(theta, flow, ctx).loss_sum
            return {**flow, LOSS_SUM: loss_sum, METRICS: {}}

        return [Piece("all", {"": self}, run)]


class OtherInPieces(InPieces):
    """Has another loss in pieces."""

    factor = 3.0


def test_pieces_that_give_another_loss_are_refused_with_both_figures() -> None:
    with pytest.raises(LossError) as error:
        check("nothing", kind=OtherInPieces)
    assert re.fullmatch(
        r"OtherInPieces.loss \(.*:\d+\) and OtherInPieces.pieces \(.*:\d+\) differ: for two "
        r"examples the sum is \S+ by loss\(\), and \S+ by pieces\(\), which a pipeline runs. .*",
        str(error.value),
    )


@pytest.mark.parametrize("way", ["nothing", "loop"])
def test_pieces_that_give_the_same_loss_pass(way: str) -> None:
    assert not any("pieces" in line for line in check(way, kind=InPieces))


@pytest.mark.parametrize(("way", "what"), [("mean", "loss"), ("mean weight", "loss_weight")])
def test_means_are_refused_with_the_figures_that_show_it(way: str, what: str) -> None:
    with pytest.raises(LossError) as error:
        check(way)
    message = str(error.value)
    assert message.startswith(f"Squares.{what} ({__file__}:")
    assert "is not a sum over the examples of a batch: for 3 examples together it is" in message
    assert "tf.reduce_sum, not tf.reduce_mean" in message
    assert ("shapes [batch, 1] and [batch]" in message) == (what == "loss")


def test_a_penalty_in_the_sum_is_refused_though_it_is_small() -> None:
    with pytest.raises(LossError, match=r"Multiply a penalty on weights by the number of examples"):
        check("penalty")


class FirstOnly(Squares):
    """Says that the first number of an example has no effect on the loss."""

    place: ClassVar[slice] = slice(0, 1)

    def equal_losses(self, batch: Any) -> Any:
        x = batch["x"].copy()
        x[:, self.place] += 1
        return batch, {**batch, "x": x}, "the loss depends on what it should not"


class Nothing(FirstOnly):
    """Compares two equal batches."""

    place: ClassVar[slice] = slice(0, 0)


def test_a_task_whose_equal_losses_differ_is_refused_with_both() -> None:
    what = r"^the loss depends on what it should not \(a loss of [\d.e-]+ became [\d.e-]+\)$"
    with pytest.raises(LossError, match=what):
        check("nothing", FirstOnly)
    assert check("used in training", Nothing) == []


def test_a_metric_that_is_a_mean_is_refused() -> None:
    what = r"^the metric 'size' of Squares.loss \(.*\) depends on how a batch is divided: for 3"
    with pytest.raises(LossError, match=what):
        check("metric is a mean")


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


def test_a_sum_that_overflows_is_no_mean() -> None:
    assert len(check("overflows")) == 1  # the weight that is not used


def test_a_sum_over_examples_with_random_numbers_is_no_mean() -> None:
    assert len(check("noise")) == 1  # the weight that is not used


def test_only_an_error_makes_it_compute_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[Any, ...]] = []
    sums = Trial.sums

    def counted(trial: Trial, batch: Any, **settings: Any) -> TrialSums:
        contents = [(name, array.tobytes()) for name, array in sorted(batch.items())]
        computed.append((*contents, *sorted(settings.items())))
        return sums(trial, batch, **settings)

    monkeypatch.setattr(Trial, "sums", counted)
    check("used in training")
    assert computed and len(computed) == len(set(computed))
    computed.clear()
    with pytest.raises(LossError):
        check("mean")
    assert len(computed) == len(set(computed)) + 3


@pytest.mark.parametrize("kind", [Nothing, InPieces])
def test_a_loss_that_differs_each_time_is_not_taken_for_another_error(kind: type[Squares]) -> None:
    (message,) = check("coupled, counts its calls", kind)
    assert "the loss does not depend on" in message  # the weight that is not used


@pytest.mark.parametrize("way", ["noise without a seed", "noise of NumPy", "counts its calls"])
def test_a_loss_that_differs_each_time_is_refused(way: str) -> None:
    with pytest.raises(
        LossError, match=r"^Squares computes a different loss each time .*tf.random, .*ctx.uniform"
    ):
        check(way)


@pytest.mark.parametrize(
    ("way", "what"),
    [("metric of NumPy", "metric 'size'"), ("penalty of NumPy", "auxiliary loss 'l2'")],
)
def test_a_metric_or_an_auxiliary_loss_that_differs_each_time_is_called_so(
    way: str, what: str
) -> None:
    with pytest.raises(LossError, match=rf"^Squares computes a different {what} each time"):
        check(way)


def test_a_mean_that_only_training_uses_is_refused() -> None:
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch in training"):
        check("mean in training")


def test_a_mean_of_small_losses_is_refused() -> None:
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch: for 3"):
        check("mean of 1e-9")


class Signed(Squares):
    """The first example has a loss of 1, and each other one of -1, as a log density may have."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        first = Points.Params(batch_size=4).instantiate().batch(0)["x"][0, 0]
        sign = tf.where(batch["x"][:, 0] == first, 1.0, -1.0)
        return LossSums(tf.reduce_sum(sign * batch["weights"]) * tf.reduce_sum(theta.w) ** 2)


class Nil(Squares):
    """The loss of all examples is 0."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        return LossSums(tf.reduce_sum(0.0 * batch["weights"]))


def test_a_sum_of_losses_of_both_signs_that_equals_the_mean_of_its_parts_is_a_sum() -> None:
    """1 and -2 are together -1, which is also a third of the first and two thirds of the second."""
    assert len(check("nothing", Signed)) == 1  # the weight that is not used


def test_losses_of_0_are_a_sum() -> None:
    assert len(check("nothing", Nil)) == 1  # the weights, which are not used


class Kinds(Points):
    """Has batches of two kinds; in those of the second one, numbers are large."""

    def steps_of_each_kind(self) -> list[int]:
        return [0, 1]

    def batch(self, step: int) -> Any:
        found = dict(super().batch(step))
        return {**found, "x": found["x"] + 100 * (step % 2)}


class MeanOfSecondKind(Squares):
    """Returns a mean of large numbers."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        found = super().loss(theta, batch, ctx).loss_sum
        return LossSums(found / len(batch["x"]) if tf.reduce_max(batch["x"]) > 50 else found)


def test_batches_of_every_kind_are_checked() -> None:
    assert len(check("nothing", MeanOfSecondKind)) == 1  # the weight that is not used
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch: for 3"):
        check("nothing", MeanOfSecondKind, train=Kinds)


def test_an_auxiliary_loss_has_to_be_a_sum_over_examples() -> None:
    assert len(check("penalty times examples")) == 1  # the weight that is not used
    what = r"^the auxiliary loss 'l2' of ctx.collect_loss is not a sum over the examples: for 3"
    with pytest.raises(LossError, match=what):
        check("penalty collected")


def test_a_weight_of_a_metric_that_does_not_add_up_is_a_warning_where_the_metric_is_0() -> None:
    assert any("weight of the metric 'size' does not add up" in x for x in check("metric of 16"))


def test_a_loss_that_couples_examples_and_says_so_need_be_no_sum() -> None:
    assert len(check("coupled")) == 1  # the weight that is not used
    with pytest.raises(InputError, match=r"the loss sum of Squares.loss .* counts them"):
        check("coupled, padding counts")


def test_a_loss_that_counts_what_fills_a_batch_up_is_refused() -> None:
    what = (
        r"^eval_inputs.dev: 1 of the 4 .* the loss sum of Squares.loss \(.*\) counts them: without"
    )
    with pytest.raises(InputError, match=what):
        check("copies count")
    with pytest.raises(InputError, match=r"the loss sum of Squares.loss .* counts .* with it nan"):
        check("no number on padding")


@pytest.mark.parametrize(
    ("way", "part"),
    [
        ("metric counts in its sum", "sum"),
        ("metric counts in its weight", "weight"),
        ("metric counts if right", "sum"),
        ("metric is no number on padding", "sum"),
    ],
)
def test_a_metric_that_counts_padding_is_refused(way: str, part: str) -> None:
    what = rf"the {part} of the metric 'size' of Squares.loss \(.*\) counts them"
    with pytest.raises(InputError, match=f"^eval_inputs.dev: .* {what}"):
        check(way)


@pytest.mark.parametrize("way", ["metric of the weights", "metric with a weight of 1 or more"])
def test_a_metric_that_does_not_count_padding_passes_though_it_is_not_0(way: str) -> None:
    assert len(check(way)) == 1  # the weight that is not used


@pytest.mark.parametrize("way", ["layer metric counts", "layer metric is a mean that counts"])
def test_a_metric_of_a_layer_that_counts_padding_is_a_warning(way: str) -> None:
    message, _ = check(way)
    assert message.startswith(
        "eval_inputs.dev: the sum of the metric 'mean square' of ctx.collect_m"
    )
    assert "counts padding examples, which only fill up a batch: without padding it is" in message
    assert len(check("layer metric of the weights")) == 1  # the weight that is not used


def check_padding(way: str) -> list[str]:
    task = Squares.Params(way=way).instantiate()
    inputs = {"eval_inputs.dev": Points.Params(batch_size=4, order="once").instantiate()}
    found = loss_check.check_padding(task, OnHost(task), inputs)
    return [*found.warnings, *found.unchecked]


def test_padding_does_not_explain_a_loss_of_which_a_later_repetition_differs() -> None:
    """The first repetition of the examples without padding is the same by chance."""
    assert check_padding("differs in its fourth call") == []


def test_evaluations_check_padding_and_nothing_else() -> None:
    assert check_padding("nothing") == []
    assert check_padding("mean weight") == []
    with pytest.raises(InputError, match=r"the loss sum of Squares.loss .* counts them"):
        check_padding("copies count")


@pytest.mark.parametrize("way", ["probabilities", "probabilities, long loop"])
def test_a_softmax_of_probabilities_is_a_warning(way: str) -> None:
    message, _ = check(way)
    assert message.startswith("the loss of Squares applies a softmax to probabilities: ")
    assert "Remove the softmax at the end of the model" in message


@pytest.mark.parametrize("way", ["scores", "log probabilities"])
def test_a_softmax_of_scores_is_no_warning(way: str) -> None:
    assert len(check(way)) == 1  # the weight that is not used


class InAuxiliaryLoss(Squares):
    """Uses a weight in an auxiliary loss only."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        examples = tf.cast(tf.shape(batch["x"])[0], tf.float32)
        ctx.collect_loss("size", examples * tf.reduce_sum(theta.unused**2))
        return super().loss(theta, batch, ctx)


def test_a_weight_of_an_auxiliary_loss_has_a_gradient() -> None:
    assert check("nothing", InAuxiliaryLoss) == []


def test_weights_without_a_gradient_are_named_unless_frozen() -> None:
    (message,) = check("nothing")
    assert "does not depend on 'unused'" in message and "learner.frozen" in message
    assert check("nothing", frozen=["unused"]) == []


@pytest.mark.parametrize("way", ["used in training", "loop", "long loop"])
def test_what_only_training_uses_has_a_gradient(way: str) -> None:
    assert check(way) == []


@pytest.mark.parametrize(("way", "iterations"), [("loop", 6), ("long loop", 101)])
def test_a_long_loop_is_computed_once_and_then_traced_once(way: str, iterations: int) -> None:
    task = Squares.Params(way=way).instantiate()
    trial = Trial(task, flatten(task.init(seed=1)))
    batch = Points.Params(batch_size=4).instantiate().batch(0)
    first, second, third = (trial.sums(batch) for _ in range(3))
    assert second == third
    assert first.loss == pytest.approx(second.loss, rel=1e-6)  # another order of sums
    assert task.iterations == iterations  # a trace is one, a computation 2 or 100


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


def test_a_task_that_takes_only_whole_batches_is_reported() -> None:
    (message,) = check("fixed")
    assert "Squares could not be checked on a few examples" in message
