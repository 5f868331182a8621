"""LARS and LAMB: updates in proportion to the norm of each weight, for large batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.optimizers.adam import Adam
from tekso.framework.optimizers.optimizer import Optimizer, Slots, layer_norm, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class LARS(Optimizer):
    """LARS: momentum with a learning rate scaled by the ratio of weight norm and gradient norm.

        direction = gradient + weight_decay * weight
        trust = trust_coefficient * |weight| / (|gradient| + weight_decay * |weight|)
        unscaled: velocity = momentum * velocity + learning_rate * trust * direction
                  weight -= velocity
        scaled:   velocity = momentum * velocity + direction
                  weight -= learning_rate * trust * velocity

    Trust is 1 if |weight| or the denominator is 0, or if the path is in `trust_exclude`. Norms are
    computed for each layer of a stacked weight. For ResNet-50, biases and normalisation weights are
    excluded from both trust and decay.

    Source:
      You, Gitman & Ginsburg 2017 (arXiv 1708.03888), algorithm 1 ("unscaled"); both forms are
      compared in Kumar et al. 2019 (arXiv 1909.09756), where "scaled" is the MLPerf reference.
    """

    class Params(Optimizer.Params):
        """Params of LARS."""

        momentum: float = param("Decay of the velocity, in [0, 1).", default=0.9)
        momentum_form: Literal["unscaled", "scaled"] = param(
            "Whether the velocity accumulates updates (unscaled) or gradients (scaled).",
            default="unscaled",
        )
        trust_coefficient: float = param("Maximum relative update at rate 1.", default=0.001)
        trust_exclude: list[str] = param(
            "Weights with trust 1: regular expressions that match whole weight paths.", default=[]
        )
        weight_decay: float = param("Rate of weight decay, in the direction.", default=1e-4)

    decay_is_decoupled = False

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require_share("momentum")
        self._require_positive("trust_coefficient")
        _require_scaled_decay(self)
        self._untrusted = self._patterns("trust_exclude")

    def check(self, paths: Iterable[str]) -> None:
        """Checks the patterns of decay and trust; see `Optimizer.check`."""
        paths = list(paths)
        super().check(paths)
        self._check_patterns(self._untrusted, paths)

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares the slots in the class docstring."""
        return {"velocity": slot(spec, "velocity")}

    def kind(self, spec: WeightSpec) -> Hashable:
        """See `Optimizer`."""
        return self.decays(spec), spec.path in self._untrusted

    def decrement(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        """Computes the formula of the class docstring."""
        p = self.params
        decay = p.weight_decay if self.decays(spec) else 0.0
        rate = learning_rate
        if spec.path not in self._untrusted:
            weight_norm = layer_norm(weight, spec)
            scale = layer_norm(gradient, spec) + decay * weight_norm
            rate *= _ratio_or_1(p.trust_coefficient * weight_norm, scale)
        direction = gradient + decay * weight if decay else gradient
        if p.momentum_form == "scaled":
            velocity = p.momentum * slots["velocity"] + direction
            return rate * velocity, {"velocity": velocity}
        velocity = p.momentum * slots["velocity"] + rate * direction
        return velocity, {"velocity": velocity}


class LAMB(Adam):
    """LAMB: Adam with each update scaled to the norm of its weight.

        direction = update of Adam at learning rate 1 + weight_decay * weight
        weight -= learning_rate * phi(|weight|) / |direction| * direction

    phi clips to [min_weight_norm, max_weight_norm]. The ratio is 1 if phi or |direction| is 0, or
    if the path is in `trust_exclude`. Norms are computed for each layer of a stacked weight.

    Source:
      You et al. 2020 (arXiv 1904.00962), algorithm 2.
    """

    class Params(Adam.Params):
        """Params of LAMB."""

        epsilon: float = param("Added to the root of the second moment.", default=1e-6)
        weight_decay: float = param("Rate of weight decay, in the direction.", default=0.01)
        trust_exclude: list[str] = param(
            "Weights with ratio 1: regular expressions that match whole weight paths.", default=[]
        )
        min_weight_norm: float = param("Lower bound of phi.", default=0.0)
        max_weight_norm: float | None = param("Upper bound of phi; None: no bound.", default=None)

    decay_is_decoupled = False

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        p = self.params
        self._require("min_weight_norm", p.min_weight_norm >= 0, "0 or more")
        upper = p.max_weight_norm
        self._require(
            "max_weight_norm",
            upper is None or (upper > 0 and upper >= p.min_weight_norm),
            f"None, or above 0 and at least min_weight_norm ({p.min_weight_norm})",
        )
        _require_scaled_decay(self)
        self._untrusted = self._patterns("trust_exclude")

    def check(self, paths: Iterable[str]) -> None:
        """Checks the patterns of decay and trust; see `Optimizer.check`."""
        paths = list(paths)
        super().check(paths)
        self._check_patterns(self._untrusted, paths)

    def kind(self, spec: WeightSpec) -> Hashable:
        """See `Optimizer`."""
        return self.decays(spec), spec.path in self._untrusted

    def decrement(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        """Computes the formula of the class docstring."""
        direction, new_slots = super().decrement(
            spec, weight, gradient, slots, tf.ones_like(learning_rate), t
        )
        if self.decays(spec):
            direction += self.params.weight_decay * weight
        if spec.path in self._untrusted:
            return learning_rate * direction, new_slots
        phi = tf.maximum(layer_norm(weight, spec), self.params.min_weight_norm)
        if self.params.max_weight_norm is not None:
            phi = tf.minimum(phi, self.params.max_weight_norm)
        ratio = _ratio_or_1(phi, layer_norm(direction, spec))
        return learning_rate * ratio * direction, new_slots


def _ratio_or_1(numerator: tf.Tensor, denominator: tf.Tensor) -> tf.Tensor:
    one = tf.ones_like(denominator)
    divisible = denominator > 0
    ratio = numerator / tf.where(divisible, denominator, one)
    return tf.where(tf.logical_and(divisible, numerator > 0), ratio, one)


def _require_scaled_decay(optimizer: Optimizer) -> None:
    scaling = optimizer.params.weight_decay_scaling
    name = type(optimizer).__name__
    if scaling != "learning_rate":
        raise ValueError(
            f"{name}: weight_decay_scaling is {scaling!r}, but the decay of {name} is part of its "
            "direction, which is always multiplied by the learning rate: keep 'learning_rate'"
        )
