"""The compiled functions of a stage on a mesh of its own.

    read       variables ─► weights as they are used, once a step
    forward    weights, inputs ─► outputs
    backward   weights, inputs, gradients of outputs ─► gradients of inputs, sums; totals
    norms      totals ─► squared norms
    update     totals, decision ─► variables

`backward` computes the forward pass again, so a micro-batch keeps its inputs alone; losses and
metrics come from there. The gradients of weights are added to totals that lie as slots do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.context import Mode
from tekso.framework.execution.base import LEARNER, WEIGHTS
from tekso.framework.execution.mesh import step_context
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.step_errors import compiled
from tekso.framework.execution.pipeline.mesh_stage_state import MeshStageState
from tekso.framework.execution.pipeline.stage_mesh import StageMesh
from tekso.framework.execution.pipeline.stage_run import StageRun, run_stage
from tekso.framework.execution.pipeline.stage_state import Flat
from tekso.framework.execution.pipeline.stages import Stage, StagePlan
from tekso.framework.learning_step import APPLIED, Decision, select
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.weight_spec import WeightSpec

List = list[tf.Tensor]
PlacedScalars = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Offset, step and the weight of the global batch, as `put_number` places them."""


class MeshStageFunctions:
    """See the module; for micro-batches of one size.

    Args:
      stage: the stage.
      specs: of the weights that it reads, with its rows of stacked ones.
      plan: of all stages.
      mesh: where it lies.
      state: of all stages.
      task: for new statistics.
      learner: for the update.
      seed: of all randomness in the steps.
      num_examples: of the global batch.
      micro_batch_size: examples that are computed together.
      dtype: of activations.
    """

    def __init__(
        self,
        stage: Stage,
        specs: Mapping[str, WeightSpec],
        plan: StagePlan,
        *,
        mesh: StageMesh,
        state: MeshStageState,
        task: Any,
        learner: Any,
        seed: int,
        num_examples: int,
        micro_batch_size: int,
        dtype: tf.DType,
    ) -> None:
        self._stage, self._specs, self._values = stage, specs, plan.values
        self._mesh, self._state, self._task, self._learner = mesh, state, task, learner
        self._seed, self._num_examples, self._size = seed, num_examples, micro_batch_size
        self._dtype = dtype
        self._learned = plan.learned_inputs(stage)
        trained = learner.trainable(task.specs())
        self._trained = [path for path in specs if path in trained]
        groups = state.groups[stage.index]
        self._kept = [path for _, own in groups.values() for path in own]
        self.totals = {path: self._total(specs[path]) for path in self._trained}
        """Sums of the gradients of the weights."""
        self._begin = self.compiled(self._begin_graph)
        self.read = self.compiled(self._read_graph)
        self.forward = self.compiled(self._forward_graph)
        self.backward = self.compiled(self._backward_graph)
        self.norms = self.compiled(self._norms_graph)
        self.update = self.compiled(self._update_graph)
        self.evaluation_weights = self.compiled(self._evaluation_weights_graph)
        self.whole = self.compiled(self._whole_graph)

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step as a program of the mesh."""
        where = f"a stage on a {self._mesh.layout}"
        return compiled(step, where)

    def _total(self, spec: WeightSpec) -> Any:
        axes = self._mesh.layout.of_slot(spec)
        zeros = self._mesh.placement.place(
            lambda where: np.zeros([s.stop - s.start for s in where]),
            spec.shape,
            axes,
            state_dtype(spec),
        )
        return dtensor.DVariable(zeros, trainable=False, name="total")

    def context(
        self,
        weights: Mapping[str, tf.Tensor],
        mode: Mode,
        *,
        step: Any,
        offset: tf.Tensor,
        examples: int,
        num_examples: int,
    ) -> MeshContext:
        """Returns the context of some examples of a batch, which knows how the weights lie.

        Args:
          weights: that the stage reads, {path: tensor}.
          mode: "train" or "eval".
          step: number of the step.
          offset: place of the first example in the batch, as `put_number` places it.
          examples: how many are computed together.
          num_examples: of the batch.
        """
        layout = self._mesh.layout
        ctx = step_context.context(
            self._mesh.placement,
            layout,
            mode=mode,
            seed=self._seed,
            step=step,
            offset=offset[0],
            examples=examples,
            num_examples=num_examples,
        )
        ctx.know(list(weights.values()), [layout.of_weight(self._specs[p]) for p in weights])
        return ctx

    # --- weights ---

    def begin(self) -> None:
        """Begins new totals."""
        if self.totals:
            self._mesh.ask(self._begin)

    def _begin_graph(self) -> None:
        for total in self.totals.values():
            total.assign(tf.zeros_like(total))

    def _used(self, weights: Flat) -> Flat:
        layout, specs = self._mesh.layout, self._specs
        ctx = MeshContext(self._mesh.placement, layout)
        return step_context.used(layout, specs, weights, ctx, self._dtype)

    def _read_graph(self) -> Flat:
        return self._used(self._state.flat(self._stage.index, WEIGHTS))

    def _evaluated(self, applied: tf.Tensor) -> Flat:
        index = self._stage.index
        weights, slots = self._state.flat(index, WEIGHTS), self._state.flat(index, LEARNER)
        found: Flat = self._learner.evaluation_weights(weights, {**slots, APPLIED: applied[0]})
        return found

    def _evaluation_weights_graph(self, applied: tf.Tensor) -> Flat:
        return self._used(self._evaluated(applied))

    def _whole_graph(self, applied: tf.Tensor) -> Flat:
        """The weights of evaluation, whole on every device, in the type of activations."""
        return {
            path: self.replicated(step_context.cast(self._specs[path], w, self._dtype))
            for path, w in self._evaluated(applied).items()
        }

    def replicated(self, x: Any) -> tf.Tensor:
        """Returns a tensor of which every device holds all; for use in a step."""
        x = tf.convert_to_tensor(x)
        return self._mesh.placement.relayout(x, (None,) * x.shape.rank)

    # --- a micro-batch ---

    def _run(self, weights: Flat, inputs: Sequence[tf.Tensor], scalars: PlacedScalars) -> StageRun:
        offset, step, total_weight = scalars
        ctx = self.context(
            weights,
            "train",
            step=step[0],
            offset=offset,
            examples=self._size,
            num_examples=self._num_examples,
        )
        return run_stage(
            self._stage, self._values, weights, inputs, ctx, total_weight=total_weight[0]
        )

    def _forward_graph(self, weights: Flat, inputs: List, scalars: PlacedScalars) -> List:
        return self._run(weights, inputs, scalars).outputs

    def _backward_graph(
        self, weights: Flat, inputs: List, seeds: List, scalars: PlacedScalars
    ) -> tuple[List, Any]:
        trained = [weights[path] for path in self._trained]
        learned = [inputs[i] for i in self._learned]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*trained, *learned])
            run = self._run(weights, inputs, scalars)
        targets = [t for t in run.outputs if t.dtype.is_floating]
        found = tape.gradient(
            [*targets, run.total],
            [*trained, *learned],
            output_gradients=[*seeds, tf.ones_like(run.total)],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = [tf.convert_to_tensor(g) for g in found]
        for path, gradient in zip(self._trained, gradients[: len(trained)], strict=True):
            total, axes = self.totals[path], self._mesh.layout.of_slot(self._specs[path])
            gradient = tf.cast(gradient, total.dtype)
            total.assign_add(self._mesh.placement.relayout(gradient, axes))
        sums = tf.nest.map_structure(self.replicated, run.sums)
        return gradients[len(trained) :], sums

    # --- the update ---

    def _gradients(self, others: Mapping[str, List]) -> Flat:
        """Totals of the weights that the stage keeps, with those of stages that have copies."""
        found = {}
        for path in self._kept:
            found[path] = tf.add_n([self.totals[path].read_value(), *others.get(path, [])])
        return found

    def _norms_graph(self, others: Mapping[str, List]) -> Any:
        groups = self._state.groups[self._stage.index]
        squares = self._learner.squared_norms(groups, self._gradients(others))
        return tf.nest.map_structure(self.replicated, squares)

    def _update_graph(
        self, others: Mapping[str, List], taken: Mapping[str, Any], statistics: Any
    ) -> tf.Tensor:
        """Assigns all that changes; returns a number, to wait for."""
        index = self._stage.index
        weights, slots = self._state.flat(index, WEIGHTS), self._state.flat(index, LEARNER)
        taken = tf.nest.map_structure(lambda x: None if x is None else x[0], taken)
        decision = Decision(**taken, counts={}, metrics={})
        groups, gradients = self._state.groups[index], self._gradients(others)
        new_weights, new_slots = self._learner.apply(groups, weights, gradients, slots, decision)
        new = {WEIGHTS + path: value for path, value in new_weights.items()}
        new |= {LEARNER + path: value for path, value in new_slots.items()}
        means = {name: tf.math.divide_no_nan(*pair) for name, pair in statistics.items()}
        changed = self._learner.without_frozen(self._task.new_statistics(weights, means))
        new |= {WEIGHTS + p: select(decision.finite, v, weights[p]) for p, v in changed.items()}
        self._state.store(index, new)
        return self.replicated(tf.identity(taken["finite"]))
