"""Updates a stage: computes norms of its gradients, and new values of its weights and slots.

    gradients of the stage and of copies of its weights ─► squared norms ─► the host decides
    the same gradients, and the decision ─► weights, statistics and slots

Weights are updated one after the other, so that only one weight at a time exists in both its old
and its new value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.collected import Pairs
from tekso.framework.coupling import weights_elsewhere
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.pipeline.stage_state import StageState
from tekso.framework.learning_step import Decision, UpdateScalars
from tekso.framework.nests import mapped
from tekso.framework.step import Step
from tekso.framework.weight_spec import WeightSpec

CopyGradients = Mapping[str, Sequence[tf.Tensor]]
"""Gradients of copies of weights, {path: gradients}, on the backend of the stage."""


class StageUpdate:
    """The update of one stage.

    Args:
      stage: number of the stage.
      specs: specs of the weights that it stores; of stacked weights, only its rows.
      step: steps of the task and the learner.
      state: variables of all stages.
      totals: the sums of its gradients, {path: variable}.
      backend: backend that stores the state of the stage.
    """

    def __init__(
        self,
        stage: int,
        specs: Mapping[str, WeightSpec],
        step: Step,
        state: StageState,
        totals: Mapping[str, Any],
        backend: StageBackend,
    ) -> None:
        self._stage, self._specs, self._step, self._state = stage, specs, step, state
        self._totals, self._backend = totals, backend
        self._trained = state.trained[stage]
        self._norms = backend.compiled(self._norms_graph)
        self._update = backend.compiled(self._update_graph)

    def squared_norms(self, others: CopyGradients) -> Any:
        """Returns {path: squared norms of the gradient, before and after per-weight clipping}."""
        if not self._trained:
            return {}
        found = self._backend.call(self._norms, others)
        return tf.nest.map_structure(self._backend.local, found)

    def placed(self, decision: Decision, statistics: Pairs) -> tuple[UpdateScalars, Pairs]:
        """Places the other inputs of an update on the backend.

        Args:
          decision: decision of the learner, on the host.
          statistics: sums for the weights of the stage that track batch statistics.
        """
        scalars = mapped(lambda x: self._backend.scalar(x, x.dtype), decision.scalars)
        return scalars, tf.nest.map_structure(self._backend.spread, statistics)

    def trace(self, *given: Any) -> None:
        """Traces the update, so that an optimizer with an error fails before any weight changes.

        Args:
          given: the arguments of `update`.
        """
        if self._specs:
            self._backend.trace(self._update, *given)

    def update(self, others: CopyGradients, scalars: UpdateScalars, statistics: Pairs) -> None:
        """Updates the weights and slots of the stage; `placed` returns the last two arguments."""
        if self._specs:
            self._backend.call(self._update, others, scalars, statistics)

    def _gradient(self, path: str, others: CopyGradients) -> tf.Tensor:
        return tf.add_n([self._totals[path].read_value(), *others.get(path, ())])

    def _norms_graph(self, others: CopyGradients) -> Any:
        found: dict[str, Any] = {}
        for weight in self._trained:
            path = weight.spec.path
            # One weight at a time: the squares of all would take as much memory as the gradients.
            with tf.control_dependencies([t for pair in found.values() for t in pair][-2:]):
                squares = weight.squared_norms(self._gradient(path, others))
                found[path] = tuple(map(self._backend.replicated, squares))
        return found

    def _update_graph(
        self, others: CopyGradients, placed: UpdateScalars, statistics: Pairs
    ) -> tf.Tensor:
        """Assigns all new values; returns a tensor for the caller to wait for."""
        scalars = mapped(self._backend.scalar_value, placed)
        scalars = scalars._replace(finite=self._backend.condition(placed.finite))
        variables, slot_variables = self._state.stages[self._stage]
        weights = {path: variables[path].read_value() for path in self._specs}
        with weights_elsewhere(self._step.task, self._specs, statistics):
            changed = self._step.new_statistics(weights, statistics, scalars.finite)
        done = [self._assigned(variables[p], v, self._specs[p]) for p, v in changed.items()]
        for weight in self._trained:
            path, specs = weight.spec.path, {made.path: made for made in weight.slots.values()}
            with tf.control_dependencies(done):
                new, new_slots = weight.updated(
                    variables[path].read_value(),
                    self._gradient(path, others),
                    {slot: slot_variables[slot].read_value() for slot in specs},
                    scalars,
                    fuse=self._backend.fuse_update,
                )
                done = [self._assigned(variables[path], new, weight.spec)]
                for slot, value in new_slots.items():
                    stored = self._backend.stored(value, specs[slot], "slot")
                    done.append(slot_variables[slot].assign(stored, read_value=False))
        return self._backend.replicated(tf.identity(scalars.applied))

    def _assigned(self, variable: Any, value: tf.Tensor, spec: WeightSpec) -> Any:
        return variable.assign(self._backend.stored(value, spec, "weight"), read_value=False)
