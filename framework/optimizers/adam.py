"""Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tekso.framework.optimizers.optimizer import Optimizer, Slots, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class Adam(Optimizer):
    """Adam: a running mean of gradients, divided by the root of a running mean of their squares.

        first_moment  = beta1 * first_moment  + (1 - beta1) * gradient
        second_moment = beta2 * second_moment + (1 - beta2) * gradient**2
        weight -= learning_rate * (first_moment / (1 - beta1**t))
                  / (sqrt(second_moment / (1 - beta2**t)) + epsilon),   t = 1, 2, …

    Source:
      Kingma & Ba 2015 (arXiv 1412.6980), algorithm 1.
    """

    class Params(Optimizer.Params):
        """Params of Adam."""

        beta1: float = param("Decay of the first moment, in [0, 1).", default=0.9)
        beta2: float = param("Decay of the second moment, in [0, 1).", default=0.999)
        epsilon: float = param("Added to the root of the second moment.", default=1e-8)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require_share("beta1", "beta2")
        self._require_positive("epsilon")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares the slots in the class docstring."""
        return {name: slot(spec, name) for name in ("first_moment", "second_moment")}

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
        first = p.beta1 * slots["first_moment"] + (1.0 - p.beta1) * gradient
        second = p.beta2 * slots["second_moment"] + (1.0 - p.beta2) * tf.square(gradient)
        # Both bias corrections are scalars: each costs one multiplication per element.
        rate = learning_rate / unseen_share(p.beta1, t)
        correction = 1.0 / unseen_share(p.beta2, t)
        decrement = rate * first / (tf.sqrt(correction * second) + p.epsilon)
        return decrement, {"first_moment": first, "second_moment": second}


class AdamW(Adam):
    """AdamW: Adam with decoupled weight decay, by default 0.01 times the learning rate.

    Source:
      Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.
    """

    class Params(Adam.Params):
        """Params of AdamW."""

        weight_decay: float = param("Rate of weight decay per step; 0: no decay.", default=0.01)


def unseen_share(beta: float, t: tf.Tensor) -> tf.Tensor:
    """Returns 1 - beta**t, the total weight of gradients in a running mean after t steps.

    Computed with expm1: in float32, 1 - beta**t loses three digits at beta 0.999 and t = 1.
    """
    return -tf.math.expm1(t * math.log(beta)) if beta else tf.ones_like(t)
