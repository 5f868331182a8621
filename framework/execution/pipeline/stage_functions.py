"""The compiled functions of a stage, which are subgraphs of one traced graph.

    forward          weights, inputs ─► outputs, sums; saves activations
    backward         saved activations, gradients of outputs ─► gradients of inputs; totals

A schedule may split the backward pass:

    backward         the same ─► gradients of inputs; saves only what weight_gradient needs
    weight_gradient  tensors saved by backward ─► totals

The gradients of weights are added to `totals` in place.

With rematerialisation, forward saves only its inputs, and backward recomputes the rest. A stage
without outputs (the last one) then computes everything in its backward pass, including the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.batch_sums import Sums
from tekso.framework.execution.pipeline.graph_cut import Subgraph
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_backend import Specs, StageBackend
from tekso.framework.execution.pipeline.stage_trace import SCALAR_DTYPES, trace_stage
from tekso.framework.execution.pipeline.stages import Stage
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.step import Step
from tekso.framework.weight_spec import WeightSpec

Tensors = dict[str, tf.Tensor]
"""Values of tensors of the traced graph, by their names."""


class StagePasses(NamedTuple):
    """The functions for micro-batches that save their activations, or that recompute them.

    Attributes:
      forward: None: the backward pass computes everything.
      backward: computes the gradients of inputs and, unless the schedule splits it, of weights.
    """

    forward: Subgraph | None
    backward: Subgraph


class StageFunctions:
    """The functions of a stage for micro-batches of one size, on one backend.

    All are made here, before threads call them.

    Args:
      stage: the stage.
      specs: specs of the weights that it reads; of stacked weights, only its rows.
      plan: plan of the pipeline.
      step: steps of the task and the learner.
      backend: backend that runs the stage.
      totals: sums of the same stage for micro-batches of another shape; None creates variables.

    Attributes:
      totals: the sums of the gradients of the trained weights, {path: variable}.
    """

    def __init__(
        self,
        stage: Stage,
        specs: Specs,
        plan: PipelinePlan,
        step: Step,
        backend: StageBackend,
        *,
        totals: Mapping[str, Any] | None = None,
    ) -> None:
        self._paths, self._backend = list(specs), backend
        self.totals: Mapping[str, Any] = totals or {
            path: self._total(spec) for path, spec in specs.items() if path in step.trained
        }
        self._begin = backend.compiled(self._begin_graph)
        traced = trace_stage(stage, specs, plan, step, backend, self.totals)
        self._cut, self._names, self._results = traced.cut, traced.names, traced.results
        self._splits_backward = plan.splits_backward
        kinds = [True] * plan.saves_some + [False] * plan.recomputes_some
        self._passes = {saves: self._cut_passes(saves=saves) for saves in kinds}
        self._weight_gradient = self._cut_weight_gradient() if plan.splits_backward else None

    def _total(self, spec: WeightSpec) -> Any:
        dtype = state_dtype(spec)
        zeros = np.zeros((), tf.as_dtype(dtype).as_numpy_dtype)
        own = dataclasses.replace(spec, dtype=dtype)

        def part(where: tuple[slice, ...]) -> np.ndarray:
            return np.broadcast_to(zeros, [s.stop - s.start for s in where])

        return self._backend.variable(part, own, "slot")

    # --- the functions ---

    def _cut_passes(self, *, saves: bool) -> StagePasses:
        cut, results = self._cut, self._results
        saved = cut.saved_for([*results.input_gradients, results.done]) if saves else []
        forward = None
        if saves or results.outputs:
            made = [*results.outputs, *results.sums]
            forward = cut.function(cut.early, made, saved, results.effects)
        # If the forward pass computes nothing, the backward pass returns the sums and runs the
        # effects.
        deferred, effects = ([], None) if forward else (results.sums, results.effects)
        feeds = [*cut.lasting, *(saved if saves else cut.early), *cut.late]
        made = [*results.input_gradients, *deferred]
        if not self._splits_backward:
            return StagePasses(forward, cut.function(feeds, [*made, results.done], [], effects))
        # Save the tensors of the recomputed forward pass that the weight gradients need.
        recomputed = [] if saves else cut.saved_for([results.done])
        return StagePasses(
            forward, cut.function(feeds, made, [*recomputed, *self._between()], effects)
        )

    def _between(self) -> list[tf.Tensor]:
        return self._cut.saved_between(self._results.input_gradients, [self._results.done])

    def _cut_weight_gradient(self) -> Subgraph:
        cut, done = self._cut, [self._results.done]
        return cut.function([*cut.lasting, *cut.saved_for(done), *self._between(), *cut.late], done)

    def is_deferred(self, *, saves: bool) -> bool:
        """Whether the backward pass computes everything and the forward pass nothing.

        Args:
          saves: whether the micro-batch saves its activations; also below.
        """
        return self._passes[saves].forward is None

    def forward(
        self, known: Tensors, *, saves: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], Tensors]:
        """Returns flat outputs, flat sums, and the saved activations by name."""
        forward = self._passes[saves].forward
        if forward is None:
            raise ValueError("the backward pass computes everything")
        found, saved = self._backend.call(forward, known)
        count = len(self._results.outputs)
        return found[:count], found[count:], saved

    def backward(
        self, known: Tensors, *, saves: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], Tensors]:
        """Returns gradients of inputs, deferred sums, and tensors for `weight_gradient`.

        These tensors do not include weights and scalars, which are available for all micro-batches.
        If the schedule does not split the backward pass, there are none, and the gradients of
        weights are added to the totals.
        """
        found, saved = self._backend.call(self._passes[saves].backward, known)
        count = len(self._results.input_gradients)
        sums = found[count:][: len(self._results.sums)] if self.is_deferred(saves=saves) else []
        left: Tensors = {}
        if self._weight_gradient is not None:
            there = {
                *self._names.weights,
                *tf.nest.flatten(self._names.scalars),
                self._names.seeds[-1],
            }
            given = {**known, **saved}
            left = {name: given[name] for name in self._weight_gradient.feeds if name not in there}
        return found[:count], sums, left

    def weight_gradient(self, known: Tensors) -> None:
        """Adds the gradients of the weights to the totals, if the schedule splits the backward."""
        if self._weight_gradient is None:
            raise ValueError("the schedule does not split the backward pass")
        self._backend.call(self._weight_gradient, known)

    def sums(self, flat: Sequence[tf.Tensor]) -> Sums:
        """Returns flat sums as a nest."""
        nest: Sums = tf.nest.pack_sequence_as(self._results.structure, list(flat))
        return nest

    # --- arguments by name ---

    def weights(self, flat: Mapping[str, tf.Tensor]) -> Tensors:
        """Returns weights, given as {path: tensor}, by the names of their tensors."""
        values = (flat[path] for path in self._paths)
        return dict(zip(self._names.weights, values, strict=True))

    def inputs(self, flat: Sequence[tf.Tensor]) -> Tensors:
        """Returns the flat inputs by the names of their tensors."""
        return dict(zip(self._names.values, flat, strict=True))

    def scalars(self, step: int, total_weight: tf.Tensor, scale: tf.Tensor | None) -> Tensors:
        """Places the scalars that all micro-batches share on the backend, by name.

        Args:
          step: number of the training step.
          total_weight: loss weight of the global batch, or of every loss, as ordinary tensor.
          scale: the loss scale, an ordinary tensor; None: 1.
        """
        weights = (total_weight,) if total_weight.shape.rank == 0 else tf.unstack(total_weight)
        names, dtypes = self._names.scalars, SCALAR_DTYPES
        return {
            names.step: self._backend.scalar(step, dtypes.step),
            **{
                name: self._backend.scalar(weight, dtypes.total_weight)
                for name, weight in zip(tf.nest.flatten(names.total_weight), weights, strict=True)
            },
            self._names.seeds[-1]: self._backend.scalar(
                1.0 if scale is None else scale, tf.float32
            ),
        }

    def offset(self, first: int) -> Tensors:
        """Places the position of the first example on the backend, by name."""
        placed = self._backend.scalar(first, SCALAR_DTYPES.offset)
        return {self._names.scalars.offset: placed}

    def seeds(self, flat: Sequence[tf.Tensor]) -> Tensors:
        """Returns the gradients of the float outputs by name."""
        return dict(zip(self._names.seeds[:-1], flat, strict=True))

    # --- the totals ---

    def begin(self) -> None:
        """Sets the totals to 0."""
        if self.totals:
            self._backend.call(self._begin, self._backend.scalar(0.0, tf.float32))

    def _begin_graph(self, placed: tf.Tensor) -> None:
        # Zeros that depend on no argument become constants, which the function keeps: one for each
        # shape of a weight.
        zero = self._backend.scalar_value(placed)
        done: list[Any] = []
        for total in self.totals.values():
            with tf.control_dependencies(done):  # one at a time exists twice
                zeros = tf.math.multiply_no_nan(total, tf.cast(zero, total.dtype))
                done = [total.assign(zeros, read_value=False)]
