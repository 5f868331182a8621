"""RMSProp: divides gradients by a running root mean square."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.optimizers.optimizer import Optimizer, Slots, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class RMSProp(Optimizer):
    """RMSProp: divides the gradient by its running root mean square.

        mean_square = decay * mean_square + (1 - decay) * gradient**2
        scaled = learning_rate * gradient / sqrt(mean_square + epsilon)
        weight -= scaled                                              momentum 0
        velocity = momentum * velocity + scaled; weight -= velocity   otherwise

    Epsilon is inside the root, as in the published settings of AmoebaNet (decay 0.9, momentum 0.9,
    epsilon 1). There is one slot without momentum, and there are two with momentum.

    Source:
      Tieleman & Hinton 2012, Neural Networks for Machine Learning, lecture 6e.
    """

    class Params(Optimizer.Params):
        """Params of RMSProp."""

        decay: float = param("Decay of the mean square, in [0, 1).", default=0.9)
        momentum: float = param("Decay of the velocity, in [0, 1).", default=0.0)
        epsilon: float = param("Added to the mean square.", default=1e-10)
        initial_mean_square: float = param("Initial mean square.", default=0.0)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require_share("decay", "momentum")
        self._require_positive("epsilon")
        initial = self.params.initial_mean_square
        self._require("initial_mean_square", initial >= 0, "0 or more")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares the slots in the class docstring."""
        value = self.params.initial_mean_square
        slots = {"mean_square": slot(spec, "mean_square", value=value)}
        if self.params.momentum:
            slots["velocity"] = slot(spec, "velocity")
        return slots

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
        mean_square = p.decay * slots["mean_square"] + (1.0 - p.decay) * tf.square(gradient)
        scaled = learning_rate * gradient / tf.sqrt(mean_square + p.epsilon)
        if not p.momentum:
            return scaled, {"mean_square": mean_square}
        velocity = p.momentum * slots["velocity"] + scaled
        return velocity, {"mean_square": mean_square, "velocity": velocity}
