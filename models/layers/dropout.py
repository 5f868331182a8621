"""Dropout as a layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta


class Dropout(Layer):
    """Sets elements to 0 with probability `rate` in training, scales the rest by 1 / (1 - rate).

    The mask depends on the run's seed, the step, the path of the layer and the global position of
    the element, so it is the same for any number of devices and micro-batches.

    Shapes:
      x: [batch, ...]
      returns: shape and dtype of x
    Source: Srivastava et al. 2014.
    """

    class Params(Layer.Params):
        """Params of Dropout."""

        rate: float = param("Probability of setting an element to 0, in [0, 1).", default=0.0)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not 0 <= self.params.rate < 1:
            raise ValueError(f"Dropout: rate {self.params.rate} is not in [0, 1)")

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return ops.dropout(ctx, x, self.params.rate, self)
