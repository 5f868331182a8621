"""Learners: compute new weights from gradients, with one optimizer or several by weight path.

Both learners are pure functions on flat dicts keyed by weight path. `learning_step` has their base
class.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Literal

import tensorflow as tf

from tekso.framework.learning_step import (
    EMA,
    LearnerBase,
    NonFiniteStepsError,
    Specs,
)
from tekso.framework.optimizers.optimizer import Optimizer, layer_sum, slot, state_dtype
from tekso.framework.params import REQUIRED, param
from tekso.framework.path_patterns import PathPatterns, listed
from tekso.framework.schedules import Schedule
from tekso.framework.weight_spec import WeightSpec
from tekso.framework.weight_update import is_first_update, select

__all__ = ["Learner", "LearnerBase", "MultiLearner", "NonFiniteStepsError"]


class Learner(LearnerBase):
    """One optimizer and one schedule for all weights.

    Clipping multiplies gradients by min(1, limit / norm). First the gradient of each weight (of
    each layer of a stacked weight) is clipped by its own norm to `clip_tensor_norm`. Then all
    gradients are clipped by their global norm to `clip_global_norm`. The moving average of a weight
    starts from its initial value:

        ema = decay * ema + (1 - decay) * new weight
        decay = ema_decay                               ema_start "constant"
        decay = min(ema_decay, (1 + n) / (10 + n))      "ramp", after n updates

    Slots are float32 (float64 for float64 weights). A bfloat16 weight is rounded in every update,
    which loses small updates: keep float32 weights and cast theta for the computation.

    Source:
      Clipping: Pascanu, Mikolov & Bengio 2013 (arXiv 1211.5063), algorithm 1.
    """

    class Params(LearnerBase.Params):
        """Params of Learner."""

        other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
            ("learning_rate", "lr"), "set schedule, for example schedule=Constant.Params(value=…)"
        )

        optimizer: Optimizer.Params = param("The optimizer.", default=REQUIRED)
        schedule: Schedule.Params = param("Learning rate by step.", default=REQUIRED)
        clip_global_norm: float | None = param(
            "Maximum of the global norm of all gradients; None: no limit.", default=None
        )
        clip_tensor_norm: float | None = param(
            "Maximum norm of the gradient of one weight; None: no limit.", default=None
        )
        ema_decay: float = param(
            "Decay of the moving average of weights per update; 0: no moving average.", default=0.0
        )
        ema_start: Literal["constant", "ramp"] = param(
            "Whether the decay is constant, or ramps up over the first updates.", default="constant"
        )

    def __init__(self, params: Learner.Params) -> None:
        """Builds the optimizer and the schedule."""
        super().__init__(params)
        p = self.params
        for field in ("clip_global_norm", "clip_tensor_norm"):
            limit = getattr(p, field)
            self._require(field, limit is None or limit > 0, "None or above 0")
        self._require("ema_decay", 0 <= p.ema_decay < 1, "in [0, 1)")
        self.optimizer = p.optimizer.instantiate()
        self.schedule = p.schedule.instantiate()

    def groups(self, specs: Specs) -> dict[str, tuple[Learner, dict[str, WeightSpec]]]:
        """Returns a single group with all weights that are not frozen."""
        return {"": (self, self.unfrozen(specs))}

    def slots_of(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Returns {slot name: spec} of the slots of one weight."""
        slots = self.optimizer.slots(spec)
        return {**slots, EMA: slot(spec, EMA)} if self.params.ema_decay else slots

    def kind(self, spec: WeightSpec) -> Hashable:
        """Returns a key; weights with equal keys share one compiled update function.

        In a subclass that adds or overrides other methods but not this one, every weight has its
        own update function.
        """
        return spec.shape, spec.dtype, spec.stacked, self.optimizer.kind(spec)

    def squared_norm(
        self, spec: WeightSpec, gradient: tf.Tensor | tf.IndexedSlices
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a gradient's squared norm, before and after clipping by `clip_tensor_norm`."""
        squares = self._squares(spec, _dense(spec, gradient))
        norm = _wide(tf.reduce_sum(squares), spec)
        if self.params.clip_tensor_norm is None:
            return norm, norm
        left = tf.square(tf.sqrt(squares) * self._tensor_factor(squares))
        return norm, _wide(tf.reduce_sum(left), spec)

    def global_factor(self, squared_norm: tf.Tensor) -> tf.Tensor | None:
        """Returns the clipping factor of all gradients, given their squared global norm."""
        limit = self.params.clip_global_norm
        return None if limit is None else limit / tf.maximum(tf.sqrt(squared_norm), limit)

    def clipped(
        self, spec: WeightSpec, gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor | None
    ) -> tf.Tensor:
        """Returns a gradient, clipped by its own norm and multiplied by the global factor."""
        gradient = _dense(spec, gradient)
        own: Any = 1.0
        if self.params.clip_tensor_norm is not None:
            own = self._tensor_factor(self._squares(spec, gradient))
        if factor is not None:
            own = own * tf.cast(factor, gradient.dtype)
        return gradient if isinstance(own, float) else gradient * own

    def _squares(self, spec: WeightSpec, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the squared norm for each layer of a stacked weight."""
        return layer_sum(tf.square(gradient), spec)

    def _tensor_factor(self, squares: tf.Tensor) -> tf.Tensor:
        limit = self.params.clip_tensor_norm
        return limit / tf.maximum(tf.sqrt(squares), limit)

    def update_weight(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: dict[str, tf.Tensor],
        learning_rate: tf.Tensor,
        applied: tf.Tensor,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns a new weight and its new slots; `applied` is the number of earlier updates."""
        new_weight, new_slots = self.optimizer.update(
            spec, weight, gradient, slots, learning_rate, applied
        )
        if self.params.ema_decay:
            dtype = tf.as_dtype(state_dtype(spec))
            before = select(is_first_update(applied), tf.cast(weight, dtype), slots[EMA])
            decay = self._ema_decay(tf.cast(applied, dtype))
            new_slots[EMA] = decay * before + (1.0 - decay) * tf.cast(new_weight, dtype)
        return new_weight, new_slots

    def _ema_decay(self, applied: tf.Tensor) -> Any:
        if self.params.ema_start == "constant":
            return self.params.ema_decay
        return tf.minimum((1.0 + applied) / (10.0 + applied), self.params.ema_decay)


class MultiLearner(LearnerBase):
    """Several learners, each for the weights whose path its pattern matches.

    Every trainable weight must match exactly one pattern. Each learner clips by the global norm of
    its own weights. If any gradient is not finite, all learners skip the step. Metrics are reported
    for each learner ("learning_rate/NAME", "gradient_norm/NAME"). "gradient_norm" is the norm over
    all weights, and "learning_rate" is the rate of the first learner.

        MultiLearner.Params(
            patterns={"embedding": "embedding/.*", "rest": "(?!embedding/).*"},
            learners={"embedding": Learner.Params(...), "rest": Learner.Params(...)},
        )
    """

    class Params(LearnerBase.Params):
        """Params of MultiLearner."""

        patterns: dict[str, str] = param(
            "{learner name: regular expression}, which must match the whole path of a weight.",
            default=REQUIRED,
        )
        learners: dict[str, Learner.Params] = param("The learners by name.", default=REQUIRED)

    def __init__(self, params: Learner.Params) -> None:
        """Builds the learners.

        Raises:
          ValueError: a learner has no pattern or a pattern no learner, or a learner sets a field
            that can only be set for all learners together.
        """
        super().__init__(params)
        p = self.params
        if not p.learners or set(p.learners) != set(p.patterns):
            raise ValueError(
                "MultiLearner: patterns and learners must have the same names, at least one; "
                f"patterns has {sorted(p.patterns)}, learners has {sorted(p.learners)}"
            )
        for field in (
            "accumulation_steps", "loss_scale", "max_consecutive_nonfinite_steps", "max_rollbacks"
        ):  # fmt: skip
            default = getattr(LearnerBase.Params(), field)
            for name, learner in p.learners.items():
                if getattr(learner, field) != default:
                    raise ValueError(
                        f"MultiLearner: {field} is a setting for all learners together: set it on "
                        f"the MultiLearner, not on learners.{name}"
                    )
        self.learners = {name: learner.instantiate() for name, learner in p.learners.items()}
        self._patterns = {
            name: PathPatterns([p.patterns[name]], name=f"MultiLearner.patterns.{name}")
            for name in self.learners
        }

    def groups(self, specs: Specs) -> dict[str, tuple[Learner, dict[str, WeightSpec]]]:
        """Returns {name: (learner, specs of its weights)}.

        Raises:
          ValueError: a weight matches no pattern or several, or a pattern matches no weight.
        """
        specs = self.unfrozen(specs)
        owners = {
            path: [name for name, pattern in self._patterns.items() if path in pattern]
            for path in specs
        }
        problems = []
        unmatched = [path for path, names in owners.items() if not names]
        if unmatched:
            problems.append(f"no pattern matches {listed(unmatched)}")
        problems += [
            f"{path!r} is matched by the patterns of {' and '.join(names)}"
            for path, names in owners.items()
            if len(names) > 1
        ][:5]
        for pattern in self._patterns.values():
            missed = pattern.missed(specs)
            if missed:
                problems.append(pattern.explain_miss(missed, specs))
        if problems:
            raise ValueError(
                f"MultiLearner: every weight needs exactly one learner; {'; '.join(problems)}"
            )
        return {
            name: (learner, learner.unfrozen({p: specs[p] for p in specs if owners[p] == [name]}))
            for name, learner in self.learners.items()
        }

    def is_frozen(self, path: str) -> bool:
        """Returns whether a path matches `frozen` of this learner, or of the path's own learner."""
        owners = [name for name, pattern in self._patterns.items() if path in pattern]
        return super().is_frozen(path) or any(self.learners[n].is_frozen(path) for n in owners)


def _dense(spec: WeightSpec, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns a gradient as a dense tensor in the dtype of the learner's state."""
    return tf.cast(tf.convert_to_tensor(gradient), state_dtype(spec))


def _wide(norm: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    return tf.cast(norm, tf.float64 if state_dtype(spec) == "float64" else tf.float32)
