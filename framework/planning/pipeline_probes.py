"""Measures what the host needs to start the work of a pipeline; a program, see `pipeline_time.py`.

It trains chains of links, one for each stage, whose weights have four elements. Nearly nothing is
computed, so the CPU time of a step is that of the calls. With S stages, M micro-batches and W
weights of each stage, it is

    step_s + S (stage_s + W weight_s) + 2 S M (action_s + W argument_s)

because a micro-batch has two actions for each stage, forward and backward. Real pipelines are
measured, since their calls are spread over the engine, the step and TensorFlow.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.schedules import Constant
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.theta import Theta

_WIDTH = 4
_EXAMPLES = 64
_SHAPES = ((2, 1, 1), (2, 8, 1), (2, 1, 9), (2, 8, 9), (4, 1, 1))
"""(stages, micro-batches, weights of a stage): as many as there are unknown times."""
_STEPS = 8  # between two readings of the clock
_REPEATS = 4


def main() -> None:
    """Measures pipelines; prints the fields of `PipelineStarts` as JSON."""
    largest = max(stages for stages, _, _ in _SHAPES)
    Pipelined.Params(num_stages=largest).instantiate().setup_devices()
    print(json.dumps(starts_of(dict(zip(_SHAPES, map(_seconds, _SHAPES), strict=True)))))


def starts_of(times: dict[tuple[int, int, int], float]) -> dict[str, float]:
    """Returns the fields of `PipelineStarts` from the times of the steps of `_SHAPES`.

    It solves the equations of the module's docstring, one unknown after the other, so that noise
    makes none negative.
    """
    small, long, wide, both, deep = (times[shape] for shape in _SHAPES)
    # `long` has 7 more micro-batches than `small`, of 4 actions each; `wide` has 8 more weights in
    # each of 2 stages; `deep` has 2 more stages.
    of_argument = max(0.0, (both - long - wide + small) / (4 * 7 * 8))
    of_action = max(0.0, (long - small) / (4 * 7) - of_argument)
    of_weight = max(0.0, (wide - small) / (2 * 8) - 2 * of_argument)
    action = of_action + of_argument  # with its one weight
    of_stage = max(0.0, (deep - small - 4 * action - 2 * of_weight) / 2)
    rest = small - 2 * of_stage - 4 * action - 2 * of_weight
    return {
        "step_s": max(0.0, rest),
        "stage_s": of_stage,
        "weight_s": of_weight,
        "action_s": of_action,
        "argument_s": of_argument,
    }


def _seconds(shape: tuple[int, int, int]) -> float:
    """Returns the CPU time of a step; it hardly depends on other programs."""
    stages, micro_batches, weights = shape
    execution = Pipelined.Params(num_stages=stages, num_micro_batches=micro_batches).instantiate()
    task = _Chain.Params(num_links=stages, link=_Link.Params(num_weights=weights)).instantiate()
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))
    x = np.ones([_EXAMPLES, _WIDTH], np.float32)
    signature = {"x": (x.shape, x.dtype)}
    program = execution.build(task, learner.instantiate(), seed=0, batch=signature)
    program.initialize()
    return _least(lambda: float(program.train_step({"x": x}, 1)["loss"]))


def _least(call: Callable[[], Any]) -> float:
    call()  # traces the functions
    found = []
    for _ in range(_REPEATS):
        start = time.process_time()
        for _ in range(_STEPS):
            call()
        found.append((time.process_time() - start) / _STEPS)
    return min(found)


class _Link(Layer):
    """Multiplies by its weights."""

    class Params(Layer.Params):
        """Params of _Link."""

        num_weights: int = param("Number of weights.", default=1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for i in range(self.params.num_weights):
            self.weight(f"w{i}", [_WIDTH], dims=["embed"], init=Ones.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See Layer."""
        for i in range(self.params.num_weights):
            x = x * theta[f"w{i}"]
        return x


class _Chain(Task):
    """Links one after the other."""

    class Params(Task.Params):
        """Params of _Chain."""

        num_links: int = param("Number of links.", default=2)
        link: _Link.Params = param("A link.", default=_Link.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for i in range(self.params.num_links):
            self.child(f"link{i}", self.params.link)

    def loss_weight(self, batch: Batch) -> Any:
        """See Task."""
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """See Task."""
        x = batch["x"]
        for i in range(self.params.num_links):
            x = getattr(self, f"link{i}").fprop(theta[f"link{i}"], x, ctx)
        return LossSums(tf.reduce_sum(x))

    def pieces(self) -> list[Piece]:
        """See Task."""
        names = [f"link{i}" for i in range(self.params.num_links)]
        return [Piece(n, {n: getattr(self, n)}, functools.partial(self._run, n)) for n in names]

    def _run(self, name: str, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = getattr(self, name).fprop(theta[name], flow["x"], ctx)
        if name != f"link{self.params.num_links - 1}":
            return {**flow, "x": x}
        return {**flow, LOSS_SUM: tf.reduce_sum(x), METRICS: {}}
