"""A chain of small maps as a task of pieces, and pipelines that train it in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution import Pipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.execution.pipelined import device_backends
from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.schedules import Constant
from tekso.framework.step import Step
from tekso.framework.task import Task
from tekso.framework.theta import Theta

DIM, EXAMPLES = 3, 8


class Map(Layer):
    """y = tanh(x w)."""

    class Params(Layer.Params):
        """Params of Map."""

        dtype: str = param("Of the weight.", default="float64")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [DIM, DIM], dims=("in", "embed"), init=Normal.Params(stddev=0.5))

    def fprop(self, theta: Theta, x: Any, ctx: Any) -> Any:
        return tf.tanh(tf.linalg.matmul(x, tf.cast(theta.w, x.dtype)))


class Chain(Task):
    """Maps one after the other; `between` is run before each: (number, x) -> x."""

    class Params(Task.Params):
        """Params of Chain."""

        num_maps: int = param("Number of maps.", default=4)
        weight_dtype: str = param("Of the weights.", default="float64")

    between: Callable[[int, Any], Any] = staticmethod(lambda number, x: x)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("maps", [Map.Params(dtype=self.params.weight_dtype)] * self.params.num_maps)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        pieces = [
            Piece(f"maps/{i}", {f"maps/{i}": layer}, functools.partial(self._map, i))
            for i, layer in enumerate(self.maps)
        ]
        return [*pieces, Piece("last", {}, self._last)]

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        x = self.between(i, flow["x"])
        return {**flow, "x": self.maps[i].fprop(theta.maps[str(i)], x, ctx)}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, LOSS_SUM: tf.reduce_sum(tf.square(flow["x"])), METRICS: {}}


def chain(between: Any = None, **params: Any) -> Chain:
    task = Chain.Params(**params).instantiate()
    if between is not None:
        task.between = between
    return task


def batch(step: int = 0, dtype: str = "float64") -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(step).normal(size=(EXAMPLES, DIM)).astype(dtype)}


def learner(**changes: Any) -> Any:
    params = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    return params.set(changes).instantiate()


def build(
    task: Task,
    stages: int,
    micro_batches: int,
    *,
    of: dict[str, np.ndarray] | None = None,
    by: Any = None,
    **params: Any,
) -> PipelineProgram:
    params_ = Pipelined.Params(num_stages=stages, num_micro_batches=micro_batches, **params)
    execution, signature = params_.instantiate(), signature_of(of or batch())
    by, devices = by or learner(), ["CPU:0"] * stages * params_.num_replicas
    parts = by.params.accumulation_steps
    plan = execution.plan(task, signature, parts=parts, devices=devices)
    program = PipelineProgram(
        Step(task, by, seed=3),
        plan,
        device_backends(plan),
        batch=signature,
        replan=lambda other: execution.plan(
            task, other, parts=parts, devices=devices, earlier=plan
        ),
    )
    program.initialize()
    return program
