"""Evaluation over stages that lie on meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.execution.mesh import step_context
from tekso.framework.execution.pipeline.mesh_stage_functions import MeshStageFunctions
from tekso.framework.execution.pipeline.mesh_stage_state import MeshStageState
from tekso.framework.execution.pipeline.setting import Setting
from tekso.framework.execution.pipeline.stage_evaluation import StageEvaluation
from tekso.framework.execution.pipeline.stage_mesh import Parts, StageMesh, local
from tekso.framework.execution.pipeline.stage_state import Flat
from tekso.framework.execution.pipeline.stages import Stage
from tekso.framework.learning_step import APPLIED
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, run_all
from tekso.framework.task import LossSums


class MeshStageEvaluation(StageEvaluation):
    """See StageEvaluation; between the stages, values are `Parts`."""

    def __init__(
        self,
        task: Any,
        learner: Any,
        setting: Setting,
        state: MeshStageState,
        *,
        meshes: Sequence[StageMesh],
        functions: Sequence[MeshStageFunctions],
        seed: int,
    ) -> None:
        super().__init__(task, learner, setting, state, seed=seed)
        self._mesh_state, self._meshes, self._of_stages = state, meshes, functions

    def _applied(self, stage: int) -> tf.Tensor:
        return self._meshes[stage].spread_scalar(self._mesh_state.counts()[APPLIED])

    def _evaluated(self, stage: int) -> Flat:
        """What a stage keeps, as it is evaluated."""
        function, applied = self._of_stages[stage].evaluation_weights, self._applied(stage)
        found: Flat = self._meshes[stage].ask(function, applied)
        return found

    def _stage_weights(self) -> list[Flat]:
        """The weights that every stage reads, as they are evaluated, on its mesh."""
        if self._weights is None:
            self._weights = with_copies(
                self._setting.plan.stages,
                self._setting.plan.owners,
                self._meshes,
                self._evaluated,
                self._mesh_state,
            )
        return self._weights

    def gathered(self) -> Flat:
        """Returns all weights as they are evaluated, on one device."""
        if self._gathered is None:
            plan = self._setting.plan
            found = [
                local(
                    self._meshes[s.index].call(
                        self._of_stages[s.index].whole, self._applied(s.index)
                    )
                )
                if self._mesh_state.keeps_weights(s.index)
                else {}
                for s in plan.stages
            ]
            self._gathered = {
                path: tf.concat([found[i][path] for i in holders], 0)
                if len(holders) > 1 and not plan.is_shared(path)
                else tf.identity(found[holders[0]][path])
                for path, holders in plan.owners.items()
            }
        return self._gathered

    def function(self, stage: Stage, size: int, examples: int) -> Callable[..., Any]:
        """The forward pass of a stage over some examples of a batch of `size`."""
        key = stage.index, size, examples
        if key not in self._functions:
            own, mesh = self._of_stages[stage.index], self._meshes[stage.index]

            def forward(weights: Flat, inputs: Flow, batch: Flow, offset: tf.Tensor) -> Any:
                ctx = own.context(
                    weights, "eval", step=0, offset=offset, examples=examples, num_examples=size
                )
                flow = run_all(stage.pieces, weights, inputs, ctx)
                end = LossSums(flow[LOSS_SUM], flow[METRICS]) if stage.is_last else None
                sums = ctx.collected.reported(end.metrics if end else {})
                if end:
                    weight = task_results.loss_weight(self._task, batch)
                    sums["loss"] = (end.loss_sum, tf.cast(weight, end.loss_sum.dtype))
                made = {name: flow[name] for name in stage.outputs}
                return made, tf.nest.map_structure(own.replicated, sums)

            compiled = own.compiled(forward)
            axis = step_context.batch_axis(mesh.layout, examples)

            def placed(value: Any) -> Any:
                if value is None or isinstance(value, Parts):
                    return value and mesh.take(value)
                return mesh.put(value, (axis,) + (None,) * (value.shape.rank - 1))

            def run(weights: Flat, inputs: Flow, batch: Flow, offset: tf.Tensor) -> Any:
                inputs = tf.nest.map_structure(placed, inputs)
                of_batch = tf.nest.map_structure(placed, batch) if stage.is_last else {}
                first = mesh.put_number(int(offset), "int32")
                made, sums = mesh.call(compiled, weights, inputs, of_batch, first)
                return made, local(sums)

            self._functions[key] = run
        return self._functions[key]


def with_copies(
    stages: Sequence[Stage],
    owners: Any,
    meshes: Sequence[StageMesh],
    read: Callable[[int], Flat],
    state: MeshStageState,
) -> list[Flat]:
    """Returns the weights that every stage reads, on its mesh: its own, and copies of others.

    Args:
      stages: in order.
      owners: {path: stages that read a weight, the one that keeps it first}.
      meshes: of the stages.
      read: returns what a stage keeps, by its number.
      state: knows which stages keep weights.
    """
    own = [read(s.index) if state.keeps_weights(s.index) else {} for s in stages]
    return [
        {
            path: own[s.index][path]
            if path in own[s.index]
            else meshes[s.index].take(Parts.of(own[owners[path][0]][path]))
            for path in s.weights
        }
        for s in stages
    ]
