"""The compiled functions of a stage, all parts of one traced graph.

    forward          weights, inputs ─► outputs, sums; kept: what backward needs
    backward         what was kept, gradients of outputs ─► gradients of inputs; totals
    input_gradient   the same ─► gradients of inputs; kept: what the next one needs, no more
    weight_gradient  what that kept ─► totals

The gradients of weights are added to `totals` in place.

With rematerialisation a forward keeps its inputs alone, and backward computes the rest again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.pipeline.graph_cut import Cut, GraphCut
from tekso.framework.execution.pipeline.graph_effects import effects
from tekso.framework.execution.pipeline.piece_traces import tensors
from tekso.framework.execution.pipeline.stage_run import StageRun, run_stage
from tekso.framework.execution.pipeline.stage_state import all_read
from tekso.framework.execution.pipeline.stages import Stage, StagePlan, Value
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.primitives.fusion import Fuse
from tekso.framework.weight_spec import WeightSpec

Tensors = dict[str, tf.Tensor]
"""Values of tensors of the traced graph, by their names."""


class Scalars:
    """What every function is given besides weights and inputs."""

    OFFSET, STEP, TOTAL_WEIGHT = range(3)
    SPECS = (
        tf.TensorSpec((), tf.int32),
        tf.TensorSpec((), tf.int64),
        tf.TensorSpec((), tf.float32),
    )


class StageFunctions:
    """See the module; for micro-batches of one size, on one device.

    Args:
      stage: the stage.
      specs: of the weights that it reads, with its rows of stacked ones.
      trained: paths of those that are learned.
      plan: of all stages.
      seed: of all randomness in the steps.
      num_examples: of the global batch.
      device: where it is.
      fuse: compiles stretches of elementwise work.
    """

    def __init__(
        self,
        stage: Stage,
        specs: Mapping[str, WeightSpec],
        trained: Sequence[str],
        plan: StagePlan,
        *,
        seed: int,
        num_examples: int,
        device: str,
        fuse: Fuse,
    ) -> None:
        self._stage, self._specs, self._trained = stage, specs, list(trained)
        self._values, self._seed, self._fuse = plan.values, seed, fuse
        self._learned = plan.learned_inputs(stage)
        self._num_examples, self._device = num_examples, device
        self._structure: Any = None  # of the sums
        self._effects: list[tf.Operation] = []  # of the forward pass
        outputs = [plan.values[Value(name, stage.index)] for name in stage.outputs]
        self._seeds = [leaf for leaf in tensors(outputs) if leaf.dtype.is_floating]
        with tf.device(device):
            self._totals = {
                path: tf.Variable(
                    tf.zeros(specs[path].shape, state_dtype(specs[path])),
                    trainable=False,
                    name="total",
                )
                for path in trained
            }
        self._begin = tf.function(self._begin_graph, autograph=False)
        self._gradients = all_read(self._totals)
        self._cut = self._trace()
        self._functions: dict[str, Cut] = {}

    # --- the graph ---

    def _trace(self) -> GraphCut:
        weights = [tf.TensorSpec(s.shape, s.dtype) for s in self._specs.values()]
        inputs = [leaf for value in self._stage.inputs for leaf in tensors(self._values[value])]
        seeds = [*self._seeds, tf.TensorSpec((), tf.float32)]
        early = [*weights, *inputs, *Scalars.SPECS]
        counts: dict[str, int] = {}
        made: list[tf.Tensor] = []

        def whole(*flat: tf.Tensor) -> list[tf.Tensor]:
            given = iter(flat)

            def take(count: int) -> list[tf.Tensor]:
                return [next(given) for _ in range(count)]

            own = dict(zip(self._specs, take(len(weights)), strict=True))
            values, scalars = take(len(inputs)), take(len(Scalars.SPECS))
            seeds_ = take(len(seeds))
            sources = [own[path] for path in self._trained]
            learned = [values[i] for i in self._learned]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([*sources, *learned])
                outputs, total, sums = self._compute(own, values, scalars)
                self._effects = effects(tf.compat.v1.get_default_graph())
            targets = [leaf for leaf in outputs if leaf.dtype.is_floating]
            gradients = tape.gradient(
                [*targets, total],
                [*sources, *learned],
                output_gradients=[*seeds_[:-1], tf.cast(seeds_[-1], total.dtype)],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            gradients = [tf.convert_to_tensor(g) for g in gradients]
            of_weights, of_inputs = gradients[: len(sources)], gradients[len(sources) :]
            added = [
                total.assign_add(tf.cast(gradient, total.dtype), read_value=False)
                for total, gradient in zip(self._totals.values(), of_weights, strict=True)
            ]
            with tf.control_dependencies(added):
                done = tf.identity(seeds_[-1])
            self._structure = sums
            flat_sums = tf.nest.flatten(sums)
            counts.update(outputs=len(outputs), sums=len(flat_sums), inputs=len(of_inputs))
            # Each output has a tensor of its own, even if two are the same. What TensorFlow makes
            # of what is returned waits for all that is written, so these are not returned.
            made.extend(tf.identity(t) for t in (*outputs, *flat_sums, *of_inputs, done))
            return []

        concrete = tf.function(whole, autograph=False).get_concrete_function(*early, *seeds)
        cut = GraphCut(concrete, len(seeds), num_lasting=len(weights))
        given = iter(cut.early)
        self._weight_names = [next(given).name for _ in weights]
        self._input_names = [next(given).name for _ in inputs]
        self._scalar_names = [next(given).name for _ in Scalars.SPECS]
        self._seed_names = [t.name for t in cut.late]
        parts = iter(made)
        self._outputs = [next(parts) for _ in range(counts["outputs"])]
        self._sums = [next(parts) for _ in range(counts["sums"])]
        self._of_inputs = [next(parts) for _ in range(counts["inputs"])]
        self._done = [next(parts)]
        return cut

    def _compute(self, weights: Tensors, inputs: Sequence[tf.Tensor], scalars: Any) -> StageRun:
        ctx = StepContext(
            mode="train",
            seed=self._seed,
            step=scalars[Scalars.STEP],
            example_offset=scalars[Scalars.OFFSET],
            num_examples=self._num_examples,
            fuse=self._fuse,
        )
        return run_stage(
            self._stage,
            self._values,
            weights,
            inputs,
            ctx,
            total_weight=scalars[Scalars.TOTAL_WEIGHT],
        )

    # --- what is given by name ---

    def weights(self, flat: Mapping[str, tf.Tensor]) -> Tensors:
        """Returns the values of weights {path: tensor}."""
        values = (flat[path] for path in self._specs)
        return dict(zip(self._weight_names, values, strict=True))

    def inputs(self, flat: Sequence[tf.Tensor]) -> Tensors:
        """Returns the values of the flat inputs."""
        return dict(zip(self._input_names, flat, strict=True))

    def scalars(self, *values: tf.Tensor) -> Tensors:
        """Returns the values of `Scalars`."""
        return dict(zip(self._scalar_names, values, strict=True))

    def seeds(self, flat: Sequence[tf.Tensor], one: tf.Tensor) -> Tensors:
        """Returns the gradients of the float outputs, and that of the loss, which is 1."""
        return dict(zip(self._seed_names, [*flat, one], strict=True))

    # --- the totals ---

    def begin(self) -> None:
        """Begins new totals."""
        with tf.device(self._device):  # nothing is sent to another process and back
            self._begin()

    def gradients(self) -> Tensors:
        """Returns the totals by path."""
        with tf.device(self._device):
            return self._gradients()

    def _begin_graph(self) -> None:
        for total in self._totals.values():
            with tf.device(total.device):
                total.assign(tf.zeros(total.shape, total.dtype), read_value=False)

    # --- the functions ---

    def prepare(self, *, keep: bool, again: bool, apart: bool) -> None:
        """Makes the functions that a schedule needs, so that no thread has to.

        Args:
          keep: a forward keeps what the backward pass needs.
          again: a backward pass computes the forward pass again.
          apart: the gradients of inputs and of weights are computed apart.
        """
        kept = self._cut.kept_for([*self._of_inputs, *self._done])
        between: list[tf.Tensor] = []
        late, weights = self._cut.late, self._cut.lasting
        made = [*self._outputs, *self._sums]
        if again:
            self._make("forward", self._cut.early, made, [], self._effects)
        if apart:
            between = self._cut.kept_between(self._of_inputs, self._done)
        ways = [("", kept)] if keep else []
        ways += [("_again", self._cut.early)] if again else []
        if keep:
            self._make("forward_keep", self._cut.early, made, kept, self._effects)
        for way, known in ways:
            if not apart:
                both = [*self._of_inputs, *self._done]
                self._make(f"backward{way}", [*weights, *known, *late], both, [])
                continue
            # What the second half needs of the forward pass has to be there by then.
            rest = self._cut.kept_for(self._done) if way else []
            feeds = [*weights, *known, *late]
            self._make(f"input{way}", feeds, self._of_inputs, [*rest, *between])
        if apart:
            known = [*weights, *self._cut.kept_for(self._done), *between, *late]
            self._make("weight", known, self._done, [])

    def _make(self, name: str, feeds: Any, fetches: Any, kept: Any, effects: Any = None) -> None:
        self._functions[name] = self._cut.function(feeds, fetches, kept, effects)

    def forward(
        self, known: Tensors, *, keep: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], Tensors]:
        """Returns flat outputs, flat sums, and what is kept by name."""
        found, kept = self._functions["forward_keep" if keep else "forward"](known)
        count = len(self._outputs)
        return found[:count], found[count:], kept

    def backward(self, known: Tensors, *, again: bool) -> list[tf.Tensor]:
        """Returns gradients of the inputs, and adds those of the weights to the totals."""
        found, _ = self._functions["backward_again" if again else "backward"](known)
        return found[: len(self._of_inputs)]

    def input_gradient(self, known: Tensors, *, again: bool) -> tuple[list[tf.Tensor], Tensors]:
        """Returns gradients of the inputs, and what `weight_gradient` is to be given.

        Weights and scalars are not among it: they are there for all micro-batches.
        """
        gradients, kept = self._functions["input_again" if again else "input"](known)
        there, given = {*self._weight_names, *self._scalar_names}, {**known, **kept}
        needed = [name for name in self._functions["weight"].feeds if name not in there]
        return gradients, {name: given[name] for name in needed}

    def weight_gradient(self, known: Tensors) -> None:
        """Adds the gradients of the weights to the totals."""
        self._functions["weight"](known)

    def sums(self, flat: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Returns the nest of flat sums."""
        nest: dict[str, Any] = tf.nest.pack_sequence_as(self._structure, list(flat))
        return nest
