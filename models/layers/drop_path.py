"""DropPath (stochastic depth): drops the whole output of a residual branch, example by example."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta


class DropPath(Layer):
    """Sets all elements of an example to 0 with probability `rate` in training.

    The other examples are scaled by 1 / (1 - rate). As for Dropout, the choice depends on the
    global position of the example, not on devices and micro-batches.

    Shapes:
      x: [batch, ...]
      returns: shape and dtype of x
    Raises:
      ValueError: the rate is not in [0, 1).
    Source: Huang et al. 2016, "Deep networks with stochastic depth"; Larsson et al. 2016.
    """

    class Params(Layer.Params):
        """Params of DropPath."""

        rate: float = param("Probability of dropping an example, in [0, 1).", default=0.0)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not 0 <= self.params.rate < 1:
            raise ValueError(f"DropPath: rate {self.params.rate} is not in [0, 1)")

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        if not ctx.is_training or self.params.rate == 0.0:
            return x
        examples = tf.ones([x.shape[0], *[1] * (x.shape.rank - 1)], x.dtype)
        return x * ops.dropout(ctx, examples, self.params.rate, self)


def linear_rates(last: float, count: int) -> list[float]:
    """Returns the rates of `count` blocks: from 0 in the first to `last` in the last block.

    Source: Huang et al. 2016, section 3, "linear decay".
    """
    return [last * i / max(count - 1, 1) for i in range(count)]
