"""Adam and AdamW, and the pair of moments that LAMB shares with them."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tekso.framework.optimizers.optimizer import Optimizer, Slots, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class Adam(Optimizer):
    """Adam: a running mean of the gradient over the root of one of its square.

        first_moment  = beta1 * first_moment  + (1 - beta1) * gradient
        second_moment = beta2 * second_moment + (1 - beta2) * gradient**2
        weight -= learning_rate * (first_moment / (1 - beta1**t))
                  / (sqrt(second_moment / (1 - beta2**t)) + epsilon),   t = 1, 2, …

    Source:
      Kingma & Ba 2015 (arXiv 1412.6980), algorithm 1.
    """

    class Params(Optimizer.Params):
        """Params of Adam."""

        beta1: float = param("Share of the first moment kept per step, in [0, 1).", default=0.9)
        beta2: float = param("Share of the second moment kept per step, in [0, 1).", default=0.999)
        epsilon: float = param("Added to the root of the second moment.", default=1e-8)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require_share("beta1", "beta2")
        self._require_positive("epsilon")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares what the class docstring names."""
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
        # Both corrections are scalars: one multiplication each in the loop over the elements.
        rate = learning_rate / unseen_share(p.beta1, t)
        correction = 1.0 / unseen_share(p.beta2, t)
        decrement = rate * first / (tf.sqrt(correction * second) + p.epsilon)
        return decrement, {"first_moment": first, "second_moment": second}


class AdamW(Adam):
    """Adam with decoupled weight decay, by default 0.01 times the learning rate.

    Source:
      Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.
    """

    class Params(Adam.Params):
        """Params of AdamW."""

        weight_decay: float = param("Rate of weight decay per step; 0 for none.", default=0.01)


def unseen_share(beta: float, t: tf.Tensor) -> tf.Tensor:
    """Returns 1 - beta**t, the weight that a running mean has gathered after t steps.

    By way of expm1: in float32 the plain form has lost three digits at beta 0.999 and t = 1.
    """
    return -tf.math.expm1(t * math.log(beta)) if beta else tf.ones_like(t)
