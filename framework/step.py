"""One training step and one evaluation step: pure functions, the same in every execution.

    weights, a part of the batch ─► forward ─► Sums          a part: of a replica, a tower, a
                                 ─► gradients                micro-batch, a stage of a pipeline
    sums and gradients, summed over all parts
        ─► decision of the learner (norms, finite?) ─► new weights, statistics and slots
        ─► report: means over the global batch

An execution splits the batch, places tensors, and calls these functions. Each part returns only
sums, so the split of the batch changes results by rounding only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import loss_gradients, task_results
from tekso.framework.batch_sums import Sums, part_sums
from tekso.framework.collected import Pairs
from tekso.framework.context import StepContext
from tekso.framework.foreign_variables import refused
from tekso.framework.gradient_combination import needs_each_gradient
from tekso.framework.learning_step import Decision, LearnerBase, SquaredNorms, trained_weights
from tekso.framework.loss_scale import SCALE
from tekso.framework.nests import has_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.precision import widen
from tekso.framework.random_key import RandomKey
from tekso.framework.state import State
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.task_values import mean_loss, over_losses
from tekso.framework.weight_spec import WeightSpec
from tekso.framework.weight_update import select

Flat = dict[str, tf.Tensor]


class Step:
    """The steps of a task and a learner, as functions of tensors, independent of devices.

    Args:
      task: the task.
      learner: the learner.
      seed: seed of the initial weights and of all randomness in the steps.
      dtype: type in which the model computes. Learned float32 weights are cast to it for use; in
        the state they stay float32.

    Raises:
      ValueError: the type is float16, and the learner does not scale the loss.

    Attributes:
      specs: specs of all weights and slots.
      used_specs: specs of the weights, with the types that the layers receive.
      trained: paths of the weights that get a gradient.
      groups: {group of the learner: (its learner, specs of its weights)}.
    """

    def __init__(
        self, task: Task, learner: LearnerBase, *, seed: int, dtype: str = "float32"
    ) -> None:
        if dtype == "float16" and learner.loss_scale is None:
            raise ValueError(
                "run.activation_dtype is float16, in which small gradients become 0: add "
                "--set learner.loss_scale=LossScale, or use bfloat16"
            )
        self.task, self.learner, self.seed, self.dtype = task, learner, seed, dtype
        weights = task.specs()
        self.specs: State[WeightSpec] = State(weights, learner.slots(weights))
        self.used_specs = used_specs(weights, dtype)
        self.trained = tuple(learner.trainable(weights))
        self.groups = learner.groups(weights)
        self._all_trained = trained_weights(self.groups)

    # --- a part of a batch ---

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the weight of a batch or of a part: a float32 scalar."""
        return task_results.loss_weight(self.task, batch)

    def cast(self, weights: Mapping[str, tf.Tensor]) -> Flat:
        """Returns weights {path: tensor}, cast to the types that the layers receive."""
        specs = self.used_specs
        return {path: tf.cast(weight, specs[path].dtype) for path, weight in weights.items()}

    def loss(
        self,
        weights: Mapping[str, tf.Tensor],
        batch: Batch,
        ctx: StepContext,
        own: Iterable[tf.Variable] = (),
    ) -> LossSums:
        """Returns the loss sums of a part of a batch, computed by the whole model.

        Args:
          weights: {path: tensor} of all weights.
          batch: the part.
          ctx: the step context; the layers collect into it.
          own: variables that the execution itself reads during the call.

        Raises:
          ForeignVariableError: a layer reads a variable that it has not declared as a weight.
        """
        with refused(self.task, own=own):
            return task_results.loss(self.task, self.task.theta(self.cast(weights)), batch, ctx)

    def evaluation_weights(self, state: State[tf.Tensor]) -> Flat:
        """Returns the evaluation weights: the moving averages if the learner keeps them."""
        return self.learner.evaluation_weights(state.weights, state.slots)

    def evaluation_sums(self, end: LossSums | None, batch: Batch, ctx: StepContext) -> Pairs:
        """Returns (sum, weight) of the loss and of every metric of a part of a batch.

        Args:
          end: loss sums of the part; None in a stage of a pipeline that is not the last.
          batch: the part.
          ctx: the step context in which it was computed.
        """
        if end is None:
            return ctx.collected.reported({})
        weight = tf.cast(self.loss_weight(batch), end.loss_sum.dtype)
        loss = (over_losses(end.loss_sum), over_losses(weight))
        return {"loss": loss, **ctx.collected.reported(end.metrics)}

    def decoded(
        self, function: Callable[..., Any], weights: Mapping[str, tf.Tensor], inputs: Sequence[Any]
    ) -> Any:
        """Returns `function(theta, *inputs, ctx)`; see `ExecutionProgram.call`.

        Args:
          function: a pure function.
          weights: {path: tensor} of the evaluation weights.
          inputs: nests of tensors and None.
        """
        theta = self.task.theta(self.cast(weights))
        return function(theta, *inputs, StepContext(mode="decode", seed=self.seed))

    # --- loss scale ---

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled in the backward pass."""
        return self.learner.loss_scale is not None

    def loss_scale(self, slots: Mapping[str, Any]) -> tf.Tensor | None:
        """Returns the factor of the loss in the backward pass; None: no factor.

        It is `seed_of_total` of `with_gradients`; `unscaled` divides the gradients by it.

        Args:
          slots: {path: tensor or variable} of at least the counters of the learner.
        """
        return tf.convert_to_tensor(slots[SCALE]) if self.scales_loss else None

    # --- several losses ---

    @property
    def separates_losses(self) -> bool:
        """Whether the gradients of shared weights are computed for each loss of the task."""
        return needs_each_gradient(self.task.gradients, self.task.losses)

    def part_gradients(
        self,
        forward: Callable[[], tuple[LossSums, StepContext]],
        total_weight: tf.Tensor,
        trained: Flat,
        scale: tf.Tensor | None,
    ) -> tuple[dict[str, Any], Sums]:
        """Runs a part of a batch with the whole model; returns gradients and sums.

        Args:
          forward: returns the loss sums, and the context in which they were computed.
          total_weight: loss weight of the global batch.
          trained: {path: tensor} of the weights to differentiate with respect to.
          scale: the loss scale; None: no scale.

        Returns: {path: gradient, or with `separates_losses` a tuple of those of all losses}, sums.
        """
        if not self.separates_losses:

            def run() -> tuple[Sequence[tf.Tensor], Sums]:
                end, ctx = forward()
                return [], part_sums(end, ctx, total_weight)

            _, sums, gradients = with_gradients(run, trained, seed_of_total=scale)
            return {path: unscaled(g, scale) for path, g in gradients.items()}, sums
        shared, losses = self.task.shared_weights, self.task.losses
        found, (end, ctx) = loss_gradients.separate(
            forward, total_weight, trained, shared, losses, scale
        )
        gradients = tf.nest.map_structure(lambda g: unscaled(g, scale), found)
        return gradients, part_sums(end, ctx, total_weight)

    # --- all parts ---

    def update(
        self,
        state: State[tf.Tensor],
        gradients: Mapping[str, tf.Tensor],
        sums: Sums,
        step: tf.Tensor,
        *,
        fuse: Fuse = no_fusion,
        waits: bool = False,
        on_mesh: bool = False,
    ) -> tuple[State[tf.Tensor], Flat]:
        """Returns the new values of the state that a step changes, and the learner's metrics.

        If the loss or a gradient is not finite, only the counters of the learner change. A pipeline
        calls the same functions, `decide` on the host and the others on every stage.

        Args:
          state: the state before the step.
          gradients: gradients of the trained weights, summed over all parts.
          sums: summed over all parts.
          step: int64 scalar.
          fuse: compiles elementwise clusters.
          waits: begins when all gradients exist. Otherwise, ops that need the state only, such as a
            decayed slot, run early in the step, and their results stay in memory.
          on_mesh: whether the weights are sharded, so that `select` needs another condition.
        """
        gradients, more = self._combined(gradients, step)
        norms = {w.spec.path: w.squared_norms(gradients[w.spec.path]) for w in self._all_trained}
        decision = self.decide(norms, state.slots, step, sums.total)
        scalars = decision.scalars
        if on_mesh:
            scalars = scalars._replace(finite=tf.reshape(scalars.finite, [1]))
        weights, slots = {}, dict(decision.counts)
        with tf.control_dependencies([scalars.finite] if waits else []):
            for weight in self._all_trained:
                path = weight.spec.path
                weights[path], new = weight.updated(
                    state.weights[path], gradients[path], state.slots, scalars, fuse=fuse
                )
                slots |= new
        weights |= self.new_statistics(state.weights, sums.statistics, scalars.finite)
        return State(weights, slots), decision.metrics | more

    def _combined(self, gradients: Mapping[str, Any], step: tf.Tensor) -> tuple[Flat, Flat]:
        """Returns one gradient of every weight, and metrics of their combination."""
        combination = self.task.gradients
        if not self.separates_losses or combination is None:
            return dict(gradients), {}
        key = RandomKey.of_step(self.seed, step).value()
        return combination.combined(gradients, self.task.losses, key)

    def decide(
        self, norms: SquaredNorms, slots: Mapping[str, tf.Tensor], step: tf.Tensor, loss: tf.Tensor
    ) -> Decision:
        """Returns the learner's decision on a step.

        Args:
          norms: of the gradients of all trained weights.
          slots: {path: value} of at least the counters of the learner.
          step: int64 scalar.
          loss: the total loss of the global batch.
        """
        return self.learner.decide(self.groups, norms, slots, step, loss=loss)

    def new_statistics(
        self, weights: Mapping[str, tf.Tensor], statistics: Pairs, is_finite: tf.Tensor
    ) -> Flat:
        """Returns {path: new value} of the weights that track batch statistics.

        Args:
          weights: values before the step, at least for the layers that have statistics.
          statistics: {path: (sum, weight)}, summed over all parts.
          is_finite: whether the step is applied, as a condition for `select`; if not, the weights
            keep their values.
        """
        means = {name: tf.math.divide_no_nan(*pair) for name, pair in statistics.items()}
        changed = self.learner.without_frozen(self.task.new_statistics(weights, means))
        for path, value in changed.items():
            if not value.shape.is_compatible_with(weights[path].shape):
                raise ValueError(
                    f"updated_statistics returned {path!r} of shape {list(value.shape)}, but the "
                    f"weight has the shape {list(weights[path].shape)}. ops.scan stacks statistics "
                    "over its iterations, as it does the weights of a repeated stack: compute a "
                    "layer with batch statistics, such as BatchNorm, outside of other loops"
                )
        return {path: select(is_finite, value, weights[path]) for path, value in changed.items()}

    def report(self, sums: Sums, total_weight: tf.Tensor, learner_metrics: Flat) -> Flat:
        """Returns the result of `ExecutionProgram.train_step`: {name: mean over the global batch}.

        Args:
          sums: summed over all parts.
          total_weight: loss weight of the global batch.
          learner_metrics: the metrics that `update` returned.
        """
        return {
            "loss": mean_loss(sums.loss, total_weight),
            "total_loss": sums.total,
            **{name: tf.math.divide_no_nan(*pair) for name, pair in sums.metrics.items()},
            **{f"aux/{name}": value for name, value in sums.auxiliary.items()},
            **learner_metrics,
        }


def used_specs(specs: Mapping[str, WeightSpec], dtype: str) -> dict[str, WeightSpec]:
    """Returns the specs of weights with the types that the layers receive.

    Args:
      specs: specs of the weights in the state.
      dtype: type in which the model computes; learned float32 weights are cast to it.
    """
    return {
        path: dataclasses.replace(spec, dtype=dtype)
        if spec.trainable and spec.dtype == "float32"
        else spec
        for path, spec in specs.items()
    }


def with_gradients(
    forward: Callable[[], tuple[Sequence[tf.Tensor], Sums]],
    sources: Any,
    seeds: Sequence[tf.Tensor] = (),
    *,
    seed_of_total: tf.Tensor | None = None,
    returned: Callable[[Any], Any] = tf.convert_to_tensor,
) -> tuple[Sequence[tf.Tensor], Sums, Any]:
    """Runs a part of a batch and differentiates its share of the total loss.

    Args:
      forward: returns the outputs that later stages read (none for a whole model) and the sums.
      sources: nest of tensors, read by `forward`, to differentiate with respect to.
      seeds: gradients of the floating-point outputs, in their order.
      seed_of_total: gradient of the total loss; None: 1.
      returned: converts each gradient, a tensor or (of a large embedding table) IndexedSlices.

    Returns: outputs, sums, and a nest of converted gradients like `sources`.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs, sums = forward()
    one = tf.ones_like(sums.total) if seed_of_total is None else seed_of_total
    gradients = tape.gradient(
        [*(x for x in outputs if has_gradient(x)), sums.total],
        sources,
        output_gradients=[*seeds, tf.cast(one, sums.total.dtype)],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return outputs, sums, tf.nest.map_structure(returned, gradients)


def unscaled(gradient: tf.Tensor, scale: tf.Tensor | None, dtype: Any = None) -> tf.Tensor:
    """Returns a gradient divided by the loss scale, in a type that holds small numbers.

    Args:
      gradient: gradient of a weight, of the scaled loss.
      scale: float32 scalar; None: the loss is not scaled.
      dtype: type of the result; None: float32, and float64 for float64. Gradients of several parts
        of a batch are summed in it.
    """
    gradient = widen(gradient) if dtype is None else tf.cast(gradient, dtype)
    return gradient if scale is None else gradient * tf.cast(1.0 / scale, gradient.dtype)
