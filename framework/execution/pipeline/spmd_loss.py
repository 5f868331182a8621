"""The loss of a mesh program whose mesh is a pipeline; see `spmd_loop`.

State, update, checkpoints and decoding are those of `MeshProgram`. The weights of the stack are
sharded over the axis of stages.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import loops
from tekso.framework.context import Examples, StepContext
from tekso.framework.execution.base import parts_of
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import step_context, unrolled
from tekso.framework.execution.mesh.context import LayoutContext, MeshContext
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshLoss
from tekso.framework.execution.pipeline.spmd_loop import SpmdLoop, run_tick
from tekso.framework.execution.workarounds import op_places
from tekso.framework.execution.workarounds.tensors import loop_inputs
from tekso.framework.nests import mapped
from tekso.framework.pieces import Flow
from tekso.framework.step import Flat, Step
from tekso.framework.task import LossSums
from tekso.framework.theta import Theta
from tekso.framework.weight_spec import WeightSpec

DATA = "data"


class SpmdLoss(MeshLoss):
    """Computes the loss by a pipeline: the stages lie along one axis of the mesh.

    Args:
      step: the steps of a task and a learner.
      placement: the devices.
      layout: a mesh with an axis of stages, and optionally an axis of examples.
      loop: runs a batch through the stages.
    """

    advice = "Use --execution=pipelined, which runs a separate program for every stage"

    def __init__(
        self, step: Step, placement: Placement, layout: MeshLayout, loop: SpmdLoop
    ) -> None:
        super().__init__(step, layout)
        self._placement, self._loop = placement, loop
        self._num_replicas = dict(layout.mesh.axes).get(DATA, 1)

    @property
    def where(self) -> str:
        """See `MeshLoss`."""
        return f"{self._layout.mesh}, one program for all stages"

    def batch_axis(self, examples: int) -> str | None:
        """See `MeshLoss`; every device has the whole batch, and micro-batches are slices of it."""
        return None

    def sums(self, weights: Flat, batch: Flat, ctx: MeshContext, step: tf.Tensor | int) -> LossSums:
        """See `MeshLoss`.

        A batch that the micro-batches do not divide has fewer of them. One that the replicas do not
        divide is computed by the whole model on every device.
        """
        size = next(iter(batch.values())).shape[0]
        if size % self._num_replicas:
            return super().sums(weights, batch, ctx, step)
        count = parts_of(size // self._num_replicas, self._loop.num_micro_batches)
        loop = dataclasses.replace(self._loop, num_micro_batches=count)
        per_micro = size // count

        def examples(first: Any) -> Examples:
            start, of = ctx.example_offset + first, ctx.num_examples or size
            return Examples(ctx.mode, self._step.seed, step, start, per_micro, of)

        def context_of(first: Any) -> MeshContext:
            return step_context.context(self._placement, self._layout, examples(first))

        def plain(first: Any) -> StepContext:
            return _StageContext(**examples(first).arguments())

        return loop.loss(weights, dict(batch), ctx, context_of=context_of, plain=plain)


def check_stages(loop: SpmdLoop, flow: Flow, specs: Mapping[str, WeightSpec], size: int) -> None:
    """Traces a tick of one layer per stage, to find layers that cannot be vectorized.

    TensorFlow does not vectorize some ops, and vectorizes custom gradients without their gradient.

    Args:
      loop: the pipeline.
      flow: the values before the stack for a micro-batch, as TensorSpecs.
      specs: specs of all weights.
      size: number of examples of a micro-batch.

    Raises:
      ExecutionError: there are such layers.
    """

    def on_stages(shape: Sequence[int], dtype: Any) -> tf.TensorSpec:
        return tf.TensorSpec([loop.num_stages, *shape], dtype)

    def plain(first: Any) -> StepContext:
        return _StageContext(**Examples("train", 0, 0, first, size, size).arguments())

    def tick(weights: Flat, state: Flow, side: Flow, offsets: tf.Tensor) -> Any:
        return run_tick(loop, weights, state, side, offsets, plain)[0]

    parts = loop.parts
    weights = {p: on_stages((1, *specs[p].shape[1:]), specs[p].dtype) for p in parts.paths}
    state, side = (
        {name: mapped(lambda leaf: on_stages(leaf.shape, leaf.dtype), flow[name]) for name in names}
        for names in (parts.writes, parts.reads)
    )
    logger = logging.getLogger("tensorflow")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # otherwise, it prints every op that it cannot vectorize
    try:
        function = tf.function(tick, autograph=False)
        concrete = function.get_concrete_function(weights, state, side, on_stages((), tf.int32))
    finally:
        logger.setLevel(before)
    for op in op_places.ops_of(concrete.graph):
        if op_places.has_own_gradient(op):
            raise ExecutionError(
                f"{op_places.place_of(op)}: one program for all stages loses the gradient of "
                "tf.custom_gradient, tf.grad_pass_through and tf.recompute_grad in the layers of "
                "the stack: write x + tf.stop_gradient(y - x) for a value y with the gradient of "
                "x, or use --execution=pipelined"
            )


def _scan(
    ctx: _StageContext,
    body: Callable[[Theta, Any, Any, Any], tuple[Any, Any]],
    theta: Theta,
    state: Any,
    xs: Any,
    *,
    first: int = 0,
) -> tuple[Any, Any]:
    return unrolled.scan(ctx, body, theta, state, xs, first)


def _rematerialize(
    ctx: _StageContext, function: Callable[..., Any], theta: Theta, *inputs: Any
) -> Any:
    """See `ops.rematerialize`; sums that layers collect may be constants, see `loop_inputs`."""

    @functools.wraps(function)
    def run(theta: Theta, *rest: Any) -> Any:
        output, collected = function(theta, *rest), rest[-1].collected
        sums = loop_inputs(tf.nest.flatten(collected.sums))
        collected.sums = tf.nest.pack_sequence_as(collected.sums, sums)
        return output

    return loops.rematerialize(ctx, run, theta, *inputs)


_FORMS: Mapping[str, Callable[..., Any]] = {"scan": _scan, "rematerialize": _rematerialize}


class _StageContext(LayoutContext):
    """The context of a stage: a plain context that unrolls loops over the layers of the stage.

    A mesh cannot differentiate a while loop; see `mesh.control_flow`.
    """

    forms = _FORMS
