"""Adagrad: divides gradients by the root of the sum of all squared gradients so far."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.optimizers.optimizer import Optimizer, Slots, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class Adagrad(Optimizer):
    """Adagrad: divides the gradient by the root of the sum of squared gradients.

        sum_of_squares += gradient**2
        weight -= learning_rate * gradient / (sqrt(sum_of_squares) + epsilon)

    Source:
      Duchi, Hazan & Singer 2011, fig. 1 with a diagonal matrix; its delta is epsilon.
    """

    class Params(Optimizer.Params):
        """Params of Adagrad."""

        initial_sum_of_squares: float = param("Initial sum of squares.", default=0.0)
        epsilon: float = param("Added to the root.", default=1e-10)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        initial = self.params.initial_sum_of_squares
        self._require("initial_sum_of_squares", initial >= 0, "0 or more")
        self._require_positive("epsilon")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares the slots in the class docstring."""
        value = self.params.initial_sum_of_squares
        return {"sum_of_squares": slot(spec, "sum_of_squares", value=value)}

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
        sum_of_squares = slots["sum_of_squares"] + tf.square(gradient)
        decrement = learning_rate * gradient / (tf.sqrt(sum_of_squares) + self.params.epsilon)
        return decrement, {"sum_of_squares": sum_of_squares}
