"""The program of a pipeline that is one SPMD program; see `spmd_loop`.

It is a `MeshProgram` in which the weights of the stack are sharded over the axis of stages. State,
update, checkpoints and decoding are inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import Batch
from tekso.framework.execution.mesh import step_context, unrolled
from tekso.framework.execution.mesh.context import LayoutContext, MeshContext
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.mesh.step_errors import compiled
from tekso.framework.execution.pipeline.spmd_loop import SpmdLoop
from tekso.framework.step import Flat, Step
from tekso.framework.task import LossSums
from tekso.framework.theta import Theta

DATA = "data"


class SpmdProgram(MeshProgram):
    """A mesh program whose loss is computed by a pipeline.

    Args:
      step: the steps of a task and a learner.
      placement: the devices.
      layout: a mesh with an axis of stages, and optionally an axis of examples.
      loop: runs a batch through the stages.
    """

    def __init__(
        self,
        step: Step,
        placement: Placement,
        layout: MeshLayout,
        loop: SpmdLoop,
    ) -> None:
        super().__init__(step, placement, layout)
        self._loop = loop
        self._num_replicas = dict(layout.mesh.axes).get(DATA, 1)

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        advice = "Use --execution=pipelined, which runs a separate program for every stage"
        return compiled(step, f"{self._layout.mesh}, one program for all stages", advice=advice)

    def _place(self, batch: Batch, parts: int = 1) -> Flat:
        """Replicates the batch on every device; micro-batches are slices of it, in order."""
        placed = {}
        for name, array in batch.items():
            if parts > 1:
                array = array.reshape([parts, len(array) // parts, *array.shape[1:]])
            placed[name] = self._placement.put(array)
        return placed

    def _loss(
        self,
        weights: Mapping[str, tf.Tensor],
        batch: Flat,
        ctx: MeshContext,
        *,
        step: Any,
        offset: Any,
    ) -> LossSums:
        size = next(iter(batch.values())).shape[0]
        count = self._loop.num_micro_batches
        if size % (count * self._num_replicas):
            return super()._loss(weights, batch, ctx, step=step, offset=offset)
        per_micro = size // count

        def context_of(first: Any) -> MeshContext:
            return step_context.context(
                self._placement,
                self._layout,
                mode=ctx.mode,
                seed=self._step.seed,
                step=step,
                offset=offset + first,
                examples=per_micro,
                num_examples=ctx.num_examples,
            )

        def plain(first: Any) -> StepContext:
            return _StageContext(
                mode=ctx.mode,
                seed=self._step.seed,
                step=step,
                example_offset=offset + first,
                num_examples=ctx.num_examples,
            )

        used = self._used(weights, ctx)
        return self._loop.loss(used, dict(batch), ctx, context_of=context_of, plain=plain)


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
