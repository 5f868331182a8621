"""The graphs of a step for estimates: as many towers and threads as the execution has."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.execution import DataParallel, ExecutionError
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.run import step_graphs
from tekso.framework.schedules import Constant
from tekso.framework.step import Step
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm

BATCH = {"x": ((4, 3), "float32")}


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


def traced(**execution: Any) -> step_graphs.StepGraphs:
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    step = Step(Normalised.Params().instantiate(), learner.instantiate(), seed=0)
    return step_graphs.trace(step, BATCH, DataParallel.Params(**execution))


@pytest.mark.parametrize(("towers", "threads"), [(None, True), (2, False)])
def test_towers_that_sum_over_each_other_have_a_core_each(
    towers: int | None, threads: bool
) -> None:
    graphs = traced(towers=towers, xla="none")
    assert (graphs.towers, graphs.uses_all_threads) == (towers or 1, threads)


def test_a_step_that_no_execution_runs_has_no_graphs() -> None:
    with pytest.raises(ExecutionError, match=r"compiled as a whole.*execution.towers=1"):
        traced(towers=2, xla="step")
