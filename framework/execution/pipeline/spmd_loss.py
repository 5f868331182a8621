"""The loss of a mesh program whose mesh is a pipeline; see `spmd_loop`.

State, update, checkpoints and decoding are those of `MeshProgram`. The weights of the stack are
sharded over the axis of stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.context import Examples, StepContext
from tekso.framework.execution.base import parts_of
from tekso.framework.execution.mesh import step_context, unrolled
from tekso.framework.execution.mesh.context import LayoutContext, MeshContext
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshLoss
from tekso.framework.execution.pipeline.spmd_loop import SpmdLoop
from tekso.framework.step import Flat, Step
from tekso.framework.task import LossSums
from tekso.framework.theta import Theta

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


_FORMS = {"scan": _scan}


class _StageContext(LayoutContext):
    """The context of a stage: a plain context that unrolls loops over the layers of the stage.

    A mesh cannot differentiate a while loop; see `mesh.control_flow`.
    """

    forms = _FORMS
