"""The gradients and sums of a batch that is computed in parts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.execution import DataParallel, Pipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.batch_parts import one_after_the_other
from tekso.framework.initializers import Ones
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.schedules import Constant
from tekso.framework.task import Task


class Slopes(Task):
    """The loss of an example is its number times a weight, so its gradient is the number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [1], dims=[None], init=Ones.Params(), dtype="bfloat16")

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def pieces(self) -> list[Piece]:
        def run(theta: Any, flow: Flow, ctx: Any) -> Flow:
            loss_sum = tf.reduce_sum(tf.cast(flow["x"], tf.bfloat16) * theta.w)
            return {**flow, LOSS_SUM: tf.cast(loss_sum, tf.float32), METRICS: {}}

        return [Piece("only", {"": self}, run)]


ALONE = DataParallel.Params(towers=1, xla="none")
TOWERS = DataParallel.Params(towers=4, xla="none")
STAGE = Pipelined.Params(num_stages=1, num_micro_batches=4)


@pytest.mark.parametrize(
    ("execution", "parts"),
    [(ALONE, 8), (TOWERS, 2), (STAGE, 2)],
    ids=["accumulation", "towers and accumulation", "micro-batches and accumulation"],
)
def test_gradients_of_bfloat16_weights_are_summed_over_parts_in_float32(
    execution: Any, parts: int
) -> None:
    """In bfloat16, 256 + 1 is 256."""
    learner = Learner.Params(
        optimizer=SGD.Params(), schedule=Constant.Params(value=0.1), accumulation_steps=parts
    ).instantiate()
    batch = {
        "x": np.array([256] + 7 * [1], np.float32),
        "weights": np.array([1] + 7 * [0], np.float32),
    }
    program = execution.instantiate().build(
        Slopes.Params().instantiate(), learner, seed=0, batch=signature_of(batch)
    )
    program.initialize()
    assert float(program.train_step(batch, 0)["gradient_norm"]) == 263


def test_a_part_begins_when_the_one_before_has_ended() -> None:
    """Otherwise, the tensors of two parts are in memory at the same time."""
    events: list[str] = []

    def note(what: str, after: tf.Tensor, seconds: float) -> tf.Tensor:
        def run(x: Any) -> Any:
            time.sleep(seconds)
            events.append(what)
            return x

        x = tf.numpy_function(run, [after], tf.float32, stateful=False)
        return tf.ensure_shape(x, after.shape)

    def compute(part: Any, start: Any, number: int) -> Any:
        x = note("end", note("begin", tf.reduce_sum(part["x"]), 0.0), 0.05)
        return [{"w": x}], {"loss": (x, x)}

    @tf.function(autograph=False)
    def whole(x: tf.Tensor) -> Any:
        return one_after_the_other({"x": x}, 0, 4, compute)

    gradients, _ = whole(tf.range(12.0))
    assert float(gradients[0]["w"]) == sum(range(12))
    assert events == ["begin", "end"] * 4
