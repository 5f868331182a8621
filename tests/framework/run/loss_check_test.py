"""Before the first step: padding that counts, another loss in pieces, weights without gradients."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from wrong_losses import OnHost, Points, Squares, check

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.draws import DrawError
from tekso.framework.input.errors import InputError
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.pieces import LOSS_SUM, METRICS, Piece, rows_of_stack
from tekso.framework.run import loss_check, loss_trial
from tekso.framework.run.loss_causes import LossError
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums
from tekso.models.layers.linear import Linear
from tekso.models.layers.stack import RepeatedStack


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


class DropsInPieces(Squares):
    """Has a piece that does not return its input."""

    def pieces(self) -> list[Piece]:
        return [Piece("first", {}, lambda theta, flow, ctx: {"x": flow["x"]}), *super().pieces()]


def test_pieces_that_drop_a_value_are_reported() -> None:
    task = DropsInPieces.Params().instantiate()
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {"input": Points.Params(batch_size=4).instantiate()}
    found = loss_check.check(task, learner.instantiate(), OnHost(task), inputs)
    (line,) = found.unchecked
    assert "ValueError: the piece 'first'" in line and "does not return weights" in line


class DrawsInPieces(InPieces):
    """Has a piece that draws the same numbers twice."""

    def pieces(self) -> list[Piece]:
        def run(theta: Any, flow: Any, ctx: Any) -> Any:
            x = flow["x"] + ctx.uniform(self, [3])
            return {**flow, "x": x - ctx.uniform(self, [3])}

        return [Piece("draws", {"": self}, run), *super().pieces()]


def test_pieces_that_draw_the_same_numbers_twice_are_refused() -> None:
    with pytest.raises(DrawError, match=r"^DrawsInPieces draws the same random numbers twice: "):
        check("nothing", kind=DrawsInPieces)


class SomeRows(Squares):
    """Has pieces that read the rows of a stack in another order, as only a pipeline can."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        layer = Linear.Params(input_dim=3, output_dim=3)
        self.child("stack", RepeatedStack.Params(num_layers=2, layer=layer))

    def pieces(self) -> list[Piece]:
        def rows(first: int, theta: Any, flow: Any, ctx: Any) -> Any:
            return {**flow, "x": self.stack.fprop(theta.stack, flow["x"], ctx, first=first)}

        return [*rows_of_stack("stack", {"stack": self.stack}, 2, rows)[1:], *super().pieces()]


def test_pieces_that_only_a_pipeline_can_run_are_not_compared() -> None:
    assert not any("pieces" in line or "rows" in line for line in check("nothing", kind=SomeRows))


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


def test_equal_losses_are_those_of_the_example_with_the_least_padding() -> None:
    ids = np.array([[1, 0, 0], [3, 1, 0], [0, 0, 0]])
    assert loss_trial.fullest({"ids": ids, "x": np.ones([3, 2, 2]), "weights": ids > 0}) == 1


@pytest.mark.parametrize("kind", [Nothing, InPieces])
def test_a_loss_that_differs_each_time_is_not_taken_for_another_error(kind: type[Squares]) -> None:
    with pytest.raises(LossError, match=r"each call changes \w+\.calls"):
        check("coupled, counts its calls", kind)


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
        mean = found / batch["x"].shape[0]
        return LossSums(tf.where(tf.reduce_max(batch["x"]) > 50, mean, found))


def test_batches_of_every_kind_are_checked() -> None:
    assert len(check("nothing", MeanOfSecondKind)) == 1  # the weight that is not used
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch: for 3"):
        check("nothing", MeanOfSecondKind, train=Kinds)


def test_a_loss_that_couples_examples_and_says_so_need_be_no_sum() -> None:
    assert len(check("coupled")) == 1  # the weight that is not used
    with pytest.raises(InputError, match=r"the loss sum of Squares.loss .* counts them"):
        check("coupled, padding counts")


def test_random_numbers_of_examples_that_are_not_of_the_context_are_refused() -> None:
    what = r"^Squares draws random numbers of examples .*ctx.uniform\(.*\n.*wrong_losses.py:\d+, in"
    with pytest.raises(LossError, match=what):
        check("coupled by stateless noise")
    assert not any("random" in line for line in check("a constant of stateless noise"))


def test_a_loss_that_counts_what_fills_a_batch_up_is_refused() -> None:
    what = (
        r"^eval_inputs.dev: 1 of the 4 .* the loss sum of Squares.loss \(.*\) counts them: without"
        r".* batch statistics exclude padding by a mask, as in the layer BatchNorm; or set eval_in"
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


def test_a_metric_of_a_layer_that_counts_padding_is_a_warning() -> None:
    message, _ = check("layer metric counts")
    assert message.startswith(
        "eval_inputs.dev: the sum of the metric 'mean square' of ctx.collect_m"
    )
    assert "counts padding examples, which only fill up a batch: without padding it is" in message
    assert len(check("layer metric of the weights")) == 1  # the weight that is not used


def test_a_metric_of_a_layer_that_is_a_mean_is_refused() -> None:
    with pytest.raises(LossError, match=r"'mean square' of ctx\.collect_metric depends on how a"):
        check("layer metric is a mean that counts")


def check_restored(way: str) -> list[str]:
    task = Squares.Params(way=way).instantiate()
    inputs = {"eval_inputs.dev": Points.Params(batch_size=4, order="once").instantiate()}
    found = loss_check.check_restored(task, OnHost(task), inputs)
    return [*found.warnings, *found.unchecked]


def test_padding_does_not_explain_a_loss_of_which_a_later_repetition_differs() -> None:
    """The first repetition of the examples without padding is the same by chance."""
    assert check_restored("differs in its fourth call") == []


def test_evaluations_check_padding_and_nothing_else() -> None:
    assert check_restored("nothing") == []
    assert check_restored("mean weight") == []
    with pytest.raises(InputError, match=r"the loss sum of Squares.loss .* counts them"):
        check_restored("copies count")


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


def test_a_task_that_takes_only_whole_batches_is_reported() -> None:
    (message,) = check("fixed")
    assert "Squares could not be checked on a few examples" in message


class BadPoints(Points):
    """No number of any example is finite."""

    def examples(self, index: Any, epoch: Any) -> Any:
        batch = super().examples(index, epoch)
        return {**batch, "x": np.full_like(batch["x"], np.nan)}


def test_a_loss_of_numbers_that_are_not_finite_names_their_array() -> None:
    (text, _) = check("nothing", train=BadPoints)
    assert text == (
        "the loss of Squares is nan for the first training examples: 'x' of these examples has "
        "numbers that are not finite"
    )


def test_a_loss_that_is_not_finite_at_the_start_is_a_warning() -> None:
    (text,) = check("overflows", frozen=["unused"])
    assert text.startswith(
        "the loss of Squares is inf for the first training examples, although their arrays are "
        "finite, and a step whose loss is not finite changes nothing. Look for a logarithm"
    )
    assert not any("finite" in line for line in check("nothing"))


class DrawsTwice(Squares):
    """Draws the same numbers twice."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = batch["x"]
        if ctx.is_training:
            x = x + ctx.uniform(self, x.shape) - ctx.uniform(self, x.shape)
        return super().loss(theta, {**batch, "x": x}, ctx)


class DrawsInLoop(Squares):
    """Draws the same numbers in each iteration."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = batch["x"]
        for _ in range(2):
            x = ops.dropout(ctx, x, 0.1, self)
        return super().loss(theta, {**batch, "x": x}, ctx)


@pytest.mark.parametrize("way", ["nothing", "long loop"])
def test_the_same_random_numbers_are_an_error_or_a_warning(way: str) -> None:
    with pytest.raises(DrawError, match=r"^DrawsTwice draws the same random numbers twice: "):
        check(way, kind=DrawsTwice)
    found = [line for line in check(way, kind=DrawsInLoop) if "random" in line]
    assert len(found) == 1
    assert found[0].startswith("DrawsInLoop draws the same random numbers several times")
