"""Moving statistics of layers that are divided among the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pipeline_chain import DIM, EXAMPLES, Chain, batch, build, learner

from tekso.framework.execution import ExecutionError
from tekso.framework.initializers import Normal
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, rows_of_stack
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.stack import RepeatedStack

LAYERS = 4


class NormedStack(Task):
    """A repeated stack of batch normalisations, each with a random scale."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        norm = BatchNorm.Params(
            dim=DIM, dtype="float64", scale_init=Normal.Params(stddev=2.0), decay=0.75
        )
        self.child("stack", RepeatedStack.Params(num_layers=LAYERS, layer=norm))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        rows = rows_of_stack("stack", {"stack": self.stack}, LAYERS, self._rows)
        return [*rows, Piece("last", {}, self._last)]

    def _rows(self, first: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, "x": self.stack.fprop(theta.stack, flow["x"], ctx, first=first)}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"] ** 3), METRICS: {}}


@pytest.mark.parametrize(
    ("micro_batches", "replicas", "parts"),
    [
        pytest.param(2, 1, 2, id="micro-batches and accumulation"),
        pytest.param(1, 2, 1, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_each_stage_moves_the_statistics_of_its_own_layers(
    micro_batches: int, replicas: int, parts: int
) -> None:
    task, of = NormedStack.Params().instantiate(), batch()
    by = learner(accumulation_steps=parts)
    program = build(task, 2, micro_batches, of=of, by=by, num_replicas=replicas)
    before = program.state()
    program.train_step(of, 0)
    after = program.state()
    # A layer normalises a micro-batch by itself, and sees all examples of the batch.
    groups = np.split(of["x"], parts * micro_batches * replicas)
    assert len(groups[0]) < EXAMPLES
    for i in range(LAYERS):
        seen = np.concatenate(groups)
        found = {name: after[f"weights/stack/layers/moving_{name}"][i] for name in MOVED}
        for name, moved in MOVED.items():
            np.testing.assert_allclose(found[name], moved(seen), rtol=1e-5, atol=1e-7)
        scale = before["weights/stack/layers/scale"][i]
        groups = [(x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) * scale for x in groups]


MOVED = {"mean": lambda x: 0.25 * x.mean(0), "variance": lambda x: 0.75 + 0.25 * x.var(0)}


class Slow(Chain):
    """The last of two maps follows the first one."""

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        if ctx.is_training:
            count = float(flow["x"].shape[0])
            ctx.collect_statistic(self, "examples", count, count)
        return super()._last(theta, flow, ctx)

    def updated_statistics(self, theta: Theta, statistics: Any) -> dict[str, tf.Tensor]:
        return {"maps/1/w": theta.maps[0].w}


class SlowElsewhere(Slow):
    """The first of two maps is set to a constant by the last stage."""

    def updated_statistics(self, theta: Theta, statistics: Any) -> dict[str, tf.Tensor]:
        return {"maps/0/w": tf.zeros([DIM, DIM], tf.float64)}


@pytest.mark.parametrize("kind", [Slow, SlowElsewhere])
def test_statistics_that_need_a_weight_of_another_stage_are_refused(kind: type[Chain]) -> None:
    task = kind.Params(num_maps=2).instantiate()
    build(task, 1, 2).train_step(batch(), 0)
    cut = build(task, 2, 2)
    what = rf"the task \({kind.__name__}\).updated_statistics .* another stage stores, .*'maps/0/w'"
    with pytest.raises(ExecutionError, match=what):
        cut.train_step(batch(), 0)
