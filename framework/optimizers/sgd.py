"""Stochastic gradient descent, without momentum, with momentum, and with Nesterov momentum."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.optimizers.optimizer import Optimizer, Slots, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class SGD(Optimizer):
    """Stochastic gradient descent without slots: weight -= learning_rate * gradient.

    Source:
      Robbins & Monro 1951.
    """

    class Params(Optimizer.Params):
        """Params of SGD."""

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
        return learning_rate * gradient, {}


class Momentum(Optimizer):
    """Stochastic gradient descent with momentum.

        velocity = momentum * velocity + gradient
        weight -= learning_rate * velocity

    The velocity does not include the learning rate, so a new rate takes effect immediately.

    Source:
      Polyak 1964; in this form Goyal et al. 2017 (arXiv 1706.02677), eq. 9.
    """

    class Params(Optimizer.Params):
        """Params of Momentum."""

        momentum: float = param("Decay of the velocity, in [0, 1).", default=0.9)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require_share("momentum")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares the slots in the class docstring."""
        return {"velocity": slot(spec, "velocity")}

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
        velocity = self.params.momentum * slots["velocity"] + gradient
        return learning_rate * self._direction(velocity, gradient), {"velocity": velocity}

    def _direction(self, velocity: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        return velocity


class Nesterov(Momentum):
    """Nesterov momentum: weight -= learning_rate * (gradient + momentum * new velocity).

    The stored weight is the point at which the next gradient is computed.

    Source:
      Sutskever et al. 2013, eq. 3 and 4, in the variable of Bengio et al. 2013
      (arXiv 1212.0901), eq. 7.
    """

    class Params(Momentum.Params):
        """Params of Nesterov."""

    def _direction(self, velocity: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        return gradient + self.params.momentum * velocity
