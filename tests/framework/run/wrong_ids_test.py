"""A wrong id in the data that the check before the first step reads is an error, not a warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from wrong_losses import OnHost, Points, Squares

from tekso.framework.context import StepContext
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.run import loss_check
from tekso.framework.run.wrong_ids import DataIdError
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums
from tekso.models.layers.embedding import Embedding


class Ids(Points):
    """Seven points with an id, one of which may be too large for a table of 5 rows."""

    class Params(Points.Params):
        """Params of Ids."""

        wrong: int = param("Number of the example with id 7; -1: none.", default=-1)

    def examples(self, index: Any, epoch: Any) -> Any:
        ids = np.where(np.arange(7) == self.params.wrong, 7, np.arange(7) % 5)
        return {**super().examples(index, epoch), "brand": ids.astype(np.int32)[index]}


class Looking(Squares):
    """Looks up the ids: in a layer, with an op, or others that it computes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("brand", Embedding.Params(vocab_size=5, dim=3))

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        way, ids = self.params.way, batch["brand"]
        if way == "computed":
            ids += 100
        if way.startswith("whole batches"):
            rows = ids if way == "whole batches, ids" else tf.constant([1, 2, 3, 0])
            error = tf.linalg.matvec(batch["x"], theta.w)
            error -= tf.gather(error, rows)
            return LossSums(tf.reduce_sum(batch["weights"] * error**2))
        if way == "layer":
            x = self.brand.fprop(theta.brand, ids, ctx)
        else:
            x = tf.gather(tf.ones([5, 3]), ids)
        squares = tf.reduce_sum(tf.square(x * theta.w), 1)
        return LossSums(tf.reduce_sum(batch["weights"] * squares))


def inputs_of(train: int = -1, dev: int = -1) -> Any:
    return {
        "input": Ids.Params(batch_size=4, order="once", wrong=train).instantiate(),
        "eval_inputs.dev": Ids.Params(batch_size=4, order="once", wrong=dev).instantiate(),
    }


def check(way: str, inputs: Any, *, is_new: bool = True) -> loss_check.Findings:
    task = Looking.Params(way=way).instantiate()
    if not is_new:
        return loss_check.check_restored(task, OnHost(task), inputs, trains=False)
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    return loss_check.check(task, learner.instantiate(), OnHost(task), inputs)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("way", ["layer", "op"])
def test_a_wrong_id_of_an_evaluation_is_an_error_that_names_its_example(
    way: str, is_new: bool
) -> None:
    says = r"'brand' \(example 2 of eval_inputs.dev.batch\(0\)\) has the id 7, but the table"
    said = rf"^brand \(Embedding\): {says}" if way == "layer" else rf"^{says}.*\n  \(at {__file__}"
    with pytest.raises(DataIdError, match=said):
        check(way, inputs_of(dev=2), is_new=is_new)
    assert not check(way, inputs_of(), is_new=is_new).unchecked


@pytest.mark.parametrize("way", ["layer", "op"])
def test_a_wrong_id_of_the_first_training_examples_is_an_error(way: str) -> None:
    with pytest.raises(
        DataIdError, match=r"'brand' \(example 1 of input.batch\(0\)\) has the id 7"
    ):
        check(way, inputs_of(train=1))


def test_an_id_that_is_not_in_the_data_is_no_error_of_the_data() -> None:
    (line,) = check("computed", inputs_of()).unchecked
    assert "could not be checked on a few examples" in line


@pytest.mark.parametrize("way", ["whole batches", "whole batches, ids"])
def test_a_loss_that_gathers_examples_of_whole_batches_is_no_error_of_the_data(way: str) -> None:
    """The data has the number 3, too, but the table has a row for each of three examples."""
    (line,) = check(way, inputs_of()).unchecked
    assert "could not be checked on a few examples" in line
