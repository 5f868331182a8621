"""Measures what the host needs to start the work of a pipeline; a program, see `pipeline_time.py`.

It trains chains of links, one for each stage, whose weights have four elements. Nearly nothing is
computed, so the CPU time of a step is that of the calls. With S stages, M micro-batches and W
weights of each stage, it is

    step_s + S (stage_s + W weight_s) + 2 S M (action_s + W argument_s)

because a micro-batch has two actions for each stage, forward and backward. Real pipelines are
measured, since their calls are spread over the engine, the step and TensorFlow.

The steps are measured in turns, each after a pause, as in training: the threads of the stages and
of TensorFlow sleep while a step waits for its batch, and a step right after another one is faster.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.planning import start_probes
from tekso.framework.planning.start_probes import ProbeTask, Products
from tekso.framework.task import Batch, LossSums
from tekso.framework.theta import Theta

_SHAPES = ((2, 1, 1), (2, 8, 1), (2, 1, 9), (2, 8, 9), (4, 1, 1))
"""(stages, micro-batches, weights of a stage): as many as there are unknown times."""
_REPEATS = 30
_WARMUP_STEPS = 12  # TensorFlow learns in some 90 runs which ops need no other thread


def main() -> None:
    """Measures pipelines; prints the fields of `PipelineStarts` as JSON."""
    largest = max(stages for stages, _, _ in _SHAPES)
    Pipelined.Params(num_stages=largest).instantiate().setup_devices()
    steps = [_step(shape) for shape in _SHAPES]
    times = start_probes.typical_times(steps, warmup_steps=_WARMUP_STEPS, repeats=_REPEATS)
    found = {shape: one.cpu_s for shape, one in zip(_SHAPES, times, strict=True)}
    print(json.dumps(starts_of(found)))


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


def _step(shape: tuple[int, int, int]) -> Callable[[], float]:
    """Returns a function that trains a step."""
    stages, micro_batches, weights = shape
    execution = Pipelined.Params(num_stages=stages, num_micro_batches=micro_batches).instantiate()
    task = _Chain.Params(num_links=stages, link=Products.Params(num_weights=weights)).instantiate()
    batch = start_probes.batch()
    program = execution.build(task, start_probes.learner(), seed=0, batch=signature_of(batch))
    return start_probes.training_step(program, batch)


class _Chain(ProbeTask):
    """Links one after the other."""

    class Params(ProbeTask.Params):
        """Params of _Chain."""

        num_links: int = param("Number of links.", default=2)
        link: Products.Params = param("A link.", default=Products.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for i in range(self.params.num_links):
            self.child(f"link{i}", self.params.link)

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
