"""Base class of learners: the decision of a step, skipped steps, frozen weights.

    gradients --> clip each --> clip all --> optimizer (slots, schedule) --> new weights --> EMA
        |
        +-------> norm --> finite? -- no --> weights and slots keep their values; a counter goes up

A learner has no tensors. `slots` declares its state as weight specs, so an execution shards slots
like weights. An update has three parts: `TrainedWeight.squared_norms`, `LearnerBase.decide` and
`TrainedWeight.updated`. `Step.update` puts them together (see step.py). They have no control flow
and no side effects, so an execution can compile the whole update, or one update function per kind
of weight, and devices that store different weights can each update their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework import initializers
from tekso.framework.exit_codes import ExitCode
from tekso.framework.loss_scale import SCALE, LossScale
from tekso.framework.params import Configurable, param
from tekso.framework.path_patterns import PathPatterns, listed
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.weight_spec import WeightSpec
from tekso.framework.weight_update import GroupLearner, is_first_update, kinds, select, updated

Specs = Mapping[str, WeightSpec]
Tensors = Mapping[str, tf.Tensor]

EMA = "ema"
NONFINITE_TOTAL = "nonfinite/total"
NONFINITE_CONSECUTIVE = "nonfinite/consecutive"
APPLIED = "updates/applied"  # number of steps that were not skipped, since the slots were created
_COUNTED = "nonfinite_counted"  # metric: steps of the series that the loss scale did not cause
COUNTS = (NONFINITE_TOTAL, NONFINITE_CONSECUTIVE, APPLIED)

SquaredNorms = Mapping[str, tuple[tf.Tensor, tf.Tensor]]
"""{path of a weight: squared norms of its gradient, before and after clipping by its own norm}."""


class UpdateScalars(NamedTuple):
    """The values that the update of every weight depends on, besides its own tensors.

    Attributes:
      finite: condition for `select`; if false, every weight and slot keeps its value.
      factors: {group: clipping factor of its gradients, or None}.
      rates: {group: learning rate}.
      applied: number of updates before this one.
    """

    finite: tf.Tensor
    factors: dict[str, tf.Tensor | None]
    rates: dict[str, tf.Tensor]
    applied: tf.Tensor


class Decision(NamedTuple):
    """The values of a step that depend on the gradients of all weights.

    Attributes:
      scalars: inputs of the update of every weight.
      counts: new values of the slots in `counters()`.
      metrics: {name: float32 scalar}: "learning_rate", "gradient_norm" (before clipping),
        "nonfinite_total", "nonfinite_consecutive"; with a loss scale, "loss_scale" and
        "nonfinite_counted": those of the consecutive ones that count for
        `max_consecutive_nonfinite_steps`.
    """

    scalars: UpdateScalars
    counts: dict[str, tf.Tensor]
    metrics: dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class TrainedWeight:
    """A weight that a learner updates.

    Attributes:
      group: name of its group.
      learner: learner of the group.
      spec: its spec; of a stacked weight, maybe only some rows.
      slots: {slot name: spec} of its state.
      first_of_kind: spec of the first weight with the same update function.
    """

    group: str
    learner: GroupLearner
    spec: WeightSpec
    slots: Mapping[str, WeightSpec]
    first_of_kind: WeightSpec

    def squared_norms(self, gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the squared norm of its gradient, before and after clipping by its own norm."""
        return self.learner.squared_norm(self.spec, gradient)

    def updated(
        self,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Tensors,
        scalars: UpdateScalars,
        *,
        fuse: Fuse = no_fusion,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns its new value and {path: new slot}.

        Args:
          weight: its value.
          gradient: its gradient.
          slots: {path: value} of at least its slots.
          scalars: from the decision of the step.
          fuse: how the update is compiled (see primitives/fusion.py).
        """
        factor = scalars.factors[self.group]
        given = [scalars.finite, scalars.applied, scalars.rates[self.group]]
        given += [] if factor is None else [factor]
        update = fuse(
            updated, learner=self.learner, spec=self.first_of_kind, names=tuple(self.slots)
        )
        paths = [made.path for made in self.slots.values()]
        new, *new_slots = update(weight, gradient, *(slots[path] for path in paths), *given)
        return new, dict(zip(paths, new_slots, strict=True))


class NonFiniteStepsError(ArithmeticError):
    """Too many steps in a row had a loss or a gradient that is not finite."""

    exit_code = ExitCode.NOT_FINITE


Groups = Mapping[str, tuple[GroupLearner, Mapping[str, WeightSpec]]]


class LearnerBase(Configurable):
    """Base class of learners: decides on every step, skips non-finite steps, freezes weights."""

    class Params(Configurable.Params):
        """Params that all learners have."""

        accumulation_steps: int = param(
            "Number of parts of a batch whose gradients are computed one after the other and "
            "accumulated.",
            default=1,
        )
        max_consecutive_nonfinite_steps: int = param(
            "Number of consecutive skipped steps after which the run is rolled back to the "
            "checkpoint before them, and their batches are skipped. With `loss_scale`, steps whose "
            "scale can still be lowered do not count, if their loss is finite.",
            default=10,
        )
        max_rollbacks: int = param(
            "Maximum number of rollbacks of a run; after that, training stops with an error.",
            default=3,
        )
        frozen: list[str] = param(
            "Weights that keep their values: regular expressions that match whole weight paths, "
            'for example ["encoder/.*"].',
            default=[],
        )
        loss_scale: LossScale.Params | None = param(
            "Scaling of the loss in the backward pass, for activations in float16; None: none.",
            default=None,
        )

    def __init__(self, params: LearnerBase.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        p = self.params
        self._require("accumulation_steps", p.accumulation_steps >= 1, "1 or more")
        limit = p.max_consecutive_nonfinite_steps
        self._require("max_consecutive_nonfinite_steps", limit >= 1, "1 or more")
        self._require("max_rollbacks", p.max_rollbacks >= 0, "0 or more")
        self.loss_scale: LossScale | None = p.loss_scale.instantiate() if p.loss_scale else None
        self._frozen = PathPatterns(p.frozen, name=f"{type(self).__name__}.frozen")

    def groups(self, specs: Specs) -> Groups:
        """Returns {name: (learner, specs of its weights)}."""
        raise NotImplementedError(f"{type(self).__name__} has no groups()")

    def trainable(self, specs: Specs) -> dict[str, WeightSpec]:
        """Returns the specs of the weights that are learned and therefore need a gradient.

        Raises:
          ValueError: a pattern matches no weight, or all weights are frozen.
        """
        learned = {path for _, own in self.groups(specs).values() for path in own}
        return {path: spec for path, spec in specs.items() if path in learned}

    def slots(self, specs: Specs) -> dict[str, WeightSpec]:
        """Returns {path: spec} of the learner's slots; a path is "<weight path>/<slot name>".

        It includes `counters()`.

        Raises:
          ValueError: a pattern of the learner matches no weight, or that of an optimizer no weight
            of any learner.
        """
        declared = {}
        groups = self.groups(specs)
        # The optimizers of several learners may exclude the same weights, of which one has none.
        learned = {path for _, own in groups.values() for path in own}
        paths = [path for path in specs if path in learned or self.is_frozen(path)]
        for name, (learner, own) in groups.items():
            try:
                learner.optimizer.check(paths)
            except ValueError as error:
                raise ValueError(f"learners.{name}: {error}" if name else str(error)) from error
            for spec in own.values():
                for made in learner.slots_of(spec).values():
                    declared[made.path] = made
        return declared | self.counters()

    def counters(self) -> dict[str, WeightSpec]:
        """Returns {path: spec} of the slots that belong to no weight; all are scalars.

        They count applied and skipped steps. With `loss_scale`, its slots are among them.
        """
        zero = initializers.Constant.Params(value=0.0).instantiate()
        counts = {
            path: WeightSpec(path, (), (), zero, dtype="int64", trainable=False, template=path)
            for path in COUNTS
        }
        return counts | (self.loss_scale.slots() if self.loss_scale else {})

    def decide(
        self,
        groups: Groups,
        squared_norms: SquaredNorms,
        counts: Tensors,
        step: tf.Tensor,
        *,
        loss: tf.Tensor | None = None,
    ) -> Decision:
        """Computes learning rates, clipping factors and counts, and whether the step is skipped.

        If the global gradient norm or the loss is not a finite float32 number, the step is skipped.
        Schedules depend on `step`. Optimizers depend on the number of applied updates, so a skipped
        step does not affect them.

        Args:
          groups: all of `groups(specs)`.
          squared_norms: {path: `TrainedWeight.squared_norms`} for all learned weights.
          counts: values of at least the slots in `counters()`.
          step: int64 scalar, 0 for the first step of the run.
          loss: scalar; if given, a step with a non-finite loss is skipped too.
        """
        factors, rates, squares, metrics = {}, {}, [], {}
        for name, (learner, own) in groups.items():
            pairs = [squared_norms[path] for path in own]
            squares.append(_total([before for before, _ in pairs]))
            factors[name] = learner.global_factor(_total([after for _, after in pairs]))
            rate = tf.cast(learner.schedule(step), tf.float32)
            rates[name] = metrics[_join("learning_rate", name)] = rate
            metrics[_join("gradient_norm", name)] = tf.sqrt(squares[-1])
        norm = tf.cast(tf.sqrt(_total(squares)), tf.float32)
        finite, loss_is_finite = tf.math.is_finite(norm), None
        if loss is not None:
            loss_is_finite = tf.math.is_finite(tf.cast(loss, tf.float32))
            finite = tf.logical_and(finite, loss_is_finite)
        taken = tf.cast(finite, tf.int64)
        skipped = tf.constant(1, tf.int64) - taken
        new_counts = {
            APPLIED: counts[APPLIED] + taken,
            NONFINITE_TOTAL: counts[NONFINITE_TOTAL] + skipped,
            NONFINITE_CONSECUTIVE: (counts[NONFINITE_CONSECUTIVE] + 1) * skipped,
        }
        if self.loss_scale is not None:
            new_counts |= self.loss_scale.updated(counts, finite, loss_is_finite)
            metrics["loss_scale"] = counts[SCALE]
            metrics[_COUNTED] = self.loss_scale.skipped_steps(new_counts)
        metrics["learning_rate"] = metrics[_join("learning_rate", next(iter(groups)))]
        metrics["gradient_norm"] = norm
        metrics["nonfinite_total"] = new_counts[NONFINITE_TOTAL]
        metrics["nonfinite_consecutive"] = new_counts[NONFINITE_CONSECUTIVE]
        scalars = {name: tf.cast(value, tf.float32) for name, value in metrics.items()}
        return Decision(UpdateScalars(finite, factors, rates, counts[APPLIED]), new_counts, scalars)

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Stops a run after too many skipped steps; call it on the host with a step's metrics.

        Raises:
          NonFiniteStepsError: `max_consecutive_nonfinite_steps` consecutive steps were skipped,
            not counting those that only needed a smaller loss scale.
        """
        consecutive = int(metrics["nonfinite_consecutive"])
        limit = self.params.max_consecutive_nonfinite_steps
        if int(metrics.get(_COUNTED, consecutive)) >= limit:
            raise NonFiniteStepsError(
                f"the loss or the gradients of {consecutive} consecutive steps were not finite "
                f"({int(metrics['nonfinite_total'])} in the whole run), so these steps changed "
                f"nothing. The learning rate is {float(metrics['learning_rate']):.3g}: try a "
                "smaller one, a longer warm-up, or clip_global_norm; or look for a layer that "
                "divides by zero or overflows. The limit is "
                f"learner.max_consecutive_nonfinite_steps ({limit})."
            )

    def evaluation_weights(self, weights: Tensors, slots: Tensors) -> dict[str, tf.Tensor]:
        """Returns the weights for evaluation: the moving averages of weights that have one.

        Before the first update, the moving average is the weight itself. Shapes and dtypes are
        those of `weights`.
        """
        result = dict(weights)
        for path, weight in weights.items():
            average = slots.get(f"{path}/{EMA}")
            if average is not None:
                average = tf.cast(average, weight.dtype)
                result[path] = select(is_first_update(slots[APPLIED]), weight, average)
        return result

    def unfrozen(self, specs: Specs) -> dict[str, WeightSpec]:
        """Returns the trainable weights that no pattern of `frozen` matches.

        Raises:
          ValueError: there are no weights, a pattern matches no weight, or all weights are frozen.
        """
        if not specs:
            raise ValueError(
                f"{type(self).__name__}: the model has no weights to train: declare them in the "
                "__init__ of its layers with self.weight(name, shape, …) or "
                "self.child(name, Linear.Params(…)); tf.Variables and Keras layers are not weights"
            )
        missed = self._frozen.missed(specs)
        if missed:
            raise ValueError(self._frozen.explain_miss(missed, specs))
        left = {p: s for p, s in specs.items() if s.trainable and p not in self._frozen}
        if not left:
            frozen = f"frozen={list(self._frozen.patterns)}, weights: {listed(list(specs))}"
            raise ValueError(f"{type(self).__name__}: no weight is left to train; {frozen}")
        return left

    def is_frozen(self, path: str) -> bool:
        """Returns whether a pattern of `frozen` matches the path of a weight."""
        return path in self._frozen

    def without_frozen(self, values: Tensors) -> dict[str, tf.Tensor]:
        """Returns {weight path: value} without the frozen weights."""
        return {path: value for path, value in values.items() if not self.is_frozen(path)}

    def _require(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            given = getattr(self.params, field)
            raise ValueError(f"{type(self).__name__}: {field} is {given!r}, but must be {allowed}")


def _total(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars, in float64 if one of them is float64, otherwise in float32."""
    dtype = tf.float64 if any(v.dtype == tf.float64 for v in values) else tf.float32
    return tf.add_n([tf.cast(v, dtype) for v in values])


def _join(metric: str, name: str) -> str:
    return f"{metric}/{name}" if name else metric


def trained_weights(groups: Groups) -> list[TrainedWeight]:
    """Returns the weights of groups; those of one kind share an update function."""
    found = []
    for name, (learner, own) in groups.items():
        first_of_kind: dict[Hashable, WeightSpec] = {}
        kind_of = kinds(learner)
        for spec in own.values():
            first = first_of_kind.setdefault(kind_of(spec), spec)
            found.append(TrainedWeight(name, learner, spec, learner.slots_of(spec), first))
    return found
