"""What probes of steps, meshes and pipelines share: a layer, its batch, a learner and the clock.

The layer computes next to nothing, so the CPU time of a step is that of starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.schedules import Constant
from tekso.framework.theta import Theta

_EXAMPLES, _WIDTH = 64, 4
_STEPS = 8


def batch() -> dict[str, Any]:
    """Returns a batch for `Products`: "x" [64, 4]."""
    return {"x": np.ones([_EXAMPLES, _WIDTH], np.float32)}


def learner() -> Learner:
    """Returns a learner with two slots per weight."""
    params = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))
    found: Learner = params.instantiate()
    return found


def least_seconds(
    calls: Sequence[Callable[[], Any]], *, warmup_steps: int, repeats: int, steps: int = _STEPS
) -> list[float]:
    """Returns the least CPU time of each function; it hardly depends on other programs.

    Args:
      calls: the functions; a call is a step. They are measured in turns.
      warmup_steps: number of calls of each before it is measured.
      repeats: number of measurements of each.
      steps: number of calls between two readings of the clock.
    """
    found = [math.inf] * len(calls)
    for call in calls:
        for _ in range(warmup_steps):
            call()
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.process_time()
            for _ in range(steps):
                call()
            found[i] = min(found[i], (time.process_time() - start) / steps)
    return found


class Products(Layer):
    """Multiplies by its weights.

    Shapes:
      x: [batch, 4]
      returns: [batch, 4]
    Weights:
      w0, w1, …: [4]
    """

    class Params(Layer.Params):
        """Params of Products."""

        num_weights: int = param("Number of weights.", default=1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for i in range(self.params.num_weights):
            self.weight(f"w{i}", [_WIDTH], dims=["embed"], init=Ones.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See Layer."""
        for i in range(self.params.num_weights):
            x = x * theta[f"w{i}"]
        return x
