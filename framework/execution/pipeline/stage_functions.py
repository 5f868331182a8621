"""The compiled functions of a stage, which are subgraphs of one traced graph.

    forward          weights, inputs ─► outputs, sums; saves activations
    backward         saved activations, gradients of outputs ─► gradients of inputs; totals
    input_gradient   the same ─► gradients of inputs; saves only what weight_gradient needs
    weight_gradient  tensors saved by input_gradient ─► totals

The gradients of weights are added to `totals` in place.

With rematerialisation, forward saves only its inputs, and backward recomputes the rest. A stage
without outputs (the last one) then computes everything in its backward pass, including the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.pipeline.graph_cut import GraphCut, Subgraph
from tekso.framework.execution.pipeline.graph_effects import effects
from tekso.framework.execution.pipeline.piece_traces import tensors
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.pipeline.stage_run import run_stage
from tekso.framework.execution.pipeline.stages import Stage, StagePlan, Value
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.step import Flat, Step, Sums, unscaled, with_gradients
from tekso.framework.weight_spec import WeightSpec

Tensors = dict[str, tf.Tensor]
"""Values of tensors of the traced graph, by their names."""


class Scalars:
    """The scalar arguments of every function, after weights and inputs."""

    OFFSET, STEP, TOTAL_WEIGHT = range(3)
    DTYPES = (tf.int32, tf.int64, tf.float32)


class StageFunctions:
    """The functions of a stage for micro-batches of one size, on one backend.

    Args:
      stage: the stage.
      specs: specs of the weights that it reads; of stacked weights, only its rows.
      stage_plan: all stages.
      step: steps of the task and the learner.
      num_examples: number of examples of the global batch.
      micro_batch_size: number of examples that are computed together.
      backend: backend that runs the stage.
      totals: sums of the same stage for micro-batches of another shape; None creates variables.

    Attributes:
      totals: the sums of the gradients of the trained weights, {path: variable}.
    """

    def __init__(
        self,
        stage: Stage,
        specs: Mapping[str, WeightSpec],
        stage_plan: StagePlan,
        step: Step,
        *,
        num_examples: int,
        micro_batch_size: int,
        backend: StageBackend,
        totals: Mapping[str, Any] | None = None,
    ) -> None:
        self._stage, self._specs, self._step, self._place = stage, specs, step, backend
        self._trained = [path for path in specs if path in step.trained]
        self._values = stage_plan.values
        self._learned = stage_plan.learned_inputs(stage)
        self._num_examples, self._size = num_examples, micro_batch_size
        self._structure: Any = None  # of the sums
        self._effects: list[tf.Operation] = []  # of the forward pass
        outputs = [stage_plan.values[Value(name, stage.index)] for name in stage.outputs]
        self._seeds = [leaf for leaf in tensors(outputs) if leaf.dtype.is_floating]
        self.totals: Mapping[str, Any] = totals or {
            path: self._total(specs[path]) for path in self._trained
        }
        self._begin = backend.compiled(self._begin_graph)
        self._cut = self._trace()
        self._functions: dict[str, Subgraph] = {}

    def _total(self, spec: WeightSpec) -> Any:
        dtype = state_dtype(spec)
        zeros = np.zeros((), tf.as_dtype(dtype).as_numpy_dtype)
        own = dataclasses.replace(spec, dtype=dtype)

        def part(where: tuple[slice, ...]) -> np.ndarray:
            return np.broadcast_to(zeros, [s.stop - s.start for s in where])

        return self._place.variable(part, own, "slot")

    # --- the graph ---

    def _trace(self) -> GraphCut:
        backend = self._place
        used = self._step.used_specs
        weights = [tf.TensorSpec(s.shape, used[p].dtype) for p, s in self._specs.items()]
        inputs = [leaf for value in self._stage.inputs for leaf in tensors(self._values[value])]
        scalars = [backend.scalar_spec(dtype) for dtype in Scalars.DTYPES]
        seeds = [*self._seeds, backend.scalar_spec(tf.float32)]
        early = [*weights, *inputs, *scalars]
        counts: dict[str, int] = {}
        made: list[tf.Tensor] = []

        def whole(*flat: tf.Tensor) -> list[tf.Tensor]:
            given = iter(flat)

            def take(count: int) -> list[tf.Tensor]:
                return [next(given) for _ in range(count)]

            own = dict(zip(self._specs, take(len(weights)), strict=True))
            values = take(len(inputs))
            numbers = [backend.scalar_value(x) for x in take(len(scalars))]
            seeds_ = take(len(seeds))
            sources = [own[path] for path in self._trained]
            learned = [values[i] for i in self._learned]

            def forward() -> tuple[list[tf.Tensor], Sums]:
                found = self._compute(own, values, numbers)
                self._effects = effects(tf.compat.v1.get_default_graph())
                return found

            seed = backend.scalar_value(seeds_[-1])
            outputs, sums, gradients = with_gradients(
                forward, [*sources, *learned], seeds_[:-1], seed_of_total=seed
            )
            scale = seed if self._step.scales_loss else None
            of_weights, of_inputs = gradients[: len(sources)], gradients[len(sources) :]
            added = []
            for path, gradient in zip(self._trained, of_weights, strict=True):
                total = self.totals[path]
                gradient = unscaled(gradient, scale, total.dtype)
                gradient = backend.stored(gradient, self._specs[path], "slot")
                added.append(total.assign_add(gradient, read_value=False))
            with tf.control_dependencies(added):
                done = tf.identity(seeds_[-1])
            self._structure = sums
            flat_sums = [backend.replicated(x) for x in tf.nest.flatten(sums)]
            counts.update(outputs=len(outputs), sums=len(flat_sums), inputs=len(of_inputs))
            # tf.identity gives each output a separate tensor, even if two are the same. `whole`
            # does not return them: the tensors that TensorFlow makes from returned values would
            # wait for all assignments.
            made.extend(tf.identity(t) for t in (*outputs, *flat_sums, *of_inputs, done))
            backend.check(tf.compat.v1.get_default_graph())
            return []

        concrete = tf.function(whole, autograph=False).get_concrete_function(*early, *seeds)
        cut = GraphCut(concrete, len(seeds), num_lasting=len(weights))
        given = iter(cut.early)
        self._weight_names = [next(given).name for _ in weights]
        self._input_names = [next(given).name for _ in inputs]
        self._scalar_names = [next(given).name for _ in scalars]
        self._seed_names = [t.name for t in cut.late]
        parts = iter(made)
        self._outputs = [next(parts) for _ in range(counts["outputs"])]
        self._sums = [next(parts) for _ in range(counts["sums"])]
        self._of_inputs = [next(parts) for _ in range(counts["inputs"])]
        self._done = [next(parts)]
        return cut

    def _compute(
        self, weights: Flat, inputs: Sequence[tf.Tensor], scalars: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], Sums]:
        ctx = self._place.context(
            weights,
            self._specs,
            mode="train",
            seed=self._step.seed,
            step=scalars[Scalars.STEP],
            offset=scalars[Scalars.OFFSET],
            examples=self._size,
            num_examples=self._num_examples,
        )
        weight = scalars[Scalars.TOTAL_WEIGHT]
        return run_stage(
            self._stage,
            self._step.task,
            self._values,
            weights,
            inputs,
            ctx,
            total_weight=weight,
        )

    # --- arguments by name ---

    def weights(self, flat: Mapping[str, tf.Tensor]) -> Tensors:
        """Returns weights, given as {path: tensor}, by the names of their tensors."""
        values = (flat[path] for path in self._specs)
        return dict(zip(self._weight_names, values, strict=True))

    def inputs(self, flat: Sequence[tf.Tensor]) -> Tensors:
        """Returns the flat inputs by the names of their tensors."""
        return dict(zip(self._input_names, flat, strict=True))

    def scalars(self, *values: Any) -> Tensors:
        """Places the values of `Scalars` (numbers or ordinary tensors) on the backend, by name."""
        placed = map(self._place.scalar, values, Scalars.DTYPES)
        return dict(zip(self._scalar_names, placed, strict=True))

    def seeds(self, flat: Sequence[tf.Tensor], scale: Any = None) -> Tensors:
        """Returns the gradients of the float outputs and of the total loss, by name.

        Args:
          flat: gradients of the outputs.
          scale: the loss scale, a number or an ordinary tensor; None: 1.
        """
        of_total = self._place.scalar(1.0 if scale is None else scale, tf.float32)
        return dict(zip(self._seed_names, [*flat, of_total], strict=True))

    # --- the totals ---

    def begin(self) -> None:
        """Sets the totals to 0."""
        if self.totals:
            self._place.call(self._begin)

    def _begin_graph(self) -> None:
        for total in self.totals.values():
            total.assign(tf.zeros_like(total), read_value=False)

    # --- the functions ---

    def prepare(self, *, keep: bool, again: bool, apart: bool) -> None:
        """Creates the functions that a schedule needs, before threads call them.

        Args:
          keep: whether some forward pass saves the activations that the backward pass needs.
          again: whether some backward pass recomputes the forward pass.
          apart: whether the gradients of inputs and of weights are computed separately.
        """
        kept = self._cut.saved_for([*self._of_inputs, *self._done])
        between: list[tf.Tensor] = []
        late, weights = self._cut.late, self._cut.lasting
        made = [*self._outputs, *self._sums]
        if again and self._outputs:
            self._make("forward", self._cut.early, made, [], self._effects)
        if apart:
            between = self._cut.saved_between(self._of_inputs, self._done)
        ways = [("", kept)] if keep else []
        ways += [("_again", self._cut.early)] if again else []
        if keep:
            self._make("forward_keep", self._cut.early, made, kept, self._effects)
        for way, known in ways:
            # If a stage without outputs recomputes, its forward pass computes nothing, and the
            # backward pass returns the sums and runs the effects.
            sums, does = (self._sums, self._effects) if way and not self._outputs else ([], None)
            feeds = [*weights, *known, *late]
            if not apart:
                both = [*self._of_inputs, *sums, *self._done]
                self._make(f"backward{way}", feeds, both, [], does)
                continue
            # Save the tensors of the recomputed forward pass that the weight gradients need.
            rest = self._cut.saved_for(self._done) if way else []
            made_first = [*self._of_inputs, *sums]
            self._make(f"input{way}", feeds, made_first, [*rest, *between], does)
        if apart:
            known = [*weights, *self._cut.saved_for(self._done), *between, *late]
            self._make("weight", known, self._done, [])

    def _make(self, name: str, feeds: Any, fetches: Any, kept: Any, effects: Any = None) -> None:
        self._functions[name] = self._cut.function(feeds, fetches, kept, effects)

    def _run(self, name: str, known: Tensors) -> tuple[list[tf.Tensor], Tensors]:
        found: tuple[list[tf.Tensor], Tensors] = self._place.call(self._functions[name], known)
        return found

    def is_deferred(self, *, keep: bool) -> bool:
        """Whether the backward pass computes everything and the forward pass nothing."""
        return not keep and not self._outputs

    def forward(
        self, known: Tensors, *, keep: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], Tensors]:
        """Returns flat outputs, flat sums, and the saved tensors by name."""
        found, kept = self._run("forward_keep" if keep else "forward", known)
        count = len(self._outputs)
        return found[:count], found[count:], kept

    def backward(self, known: Tensors, *, again: bool) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns gradients of the inputs, and sums if they were deferred; adds to the totals."""
        found, _ = self._run("backward_again" if again else "backward", known)
        return self._split(found[:-1])

    def input_gradient(
        self, known: Tensors, *, again: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], Tensors]:
        """Returns gradients of the inputs, deferred sums, and tensors for `weight_gradient`.

        These tensors do not include weights and scalars, which are available for all micro-batches.
        """
        found, kept = self._run("input_again" if again else "input", known)
        there, given = {*self._weight_names, *self._scalar_names}, {**known, **kept}
        needed = [name for name in self._functions["weight"].feeds if name not in there]
        return *self._split(found), {name: given[name] for name in needed}

    def _split(self, found: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        count = len(self._of_inputs)
        return found[:count], found[count:]

    def weight_gradient(self, known: Tensors) -> None:
        """Adds the gradients of the weights to the totals."""
        self._run("weight", known)

    def sums(self, flat: Sequence[tf.Tensor]) -> Sums:
        """Returns flat sums as a nest."""
        nest: Sums = tf.nest.pack_sequence_as(self._structure, list(flat))
        return nest
