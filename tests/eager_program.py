"""A program of tasks that calls functions without an execution."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext


class EagerProgram:
    """Calls functions eagerly with the weights of a task; see `Program`.

    Attributes:
      calls: number of calls so far.
    """

    serialize_calls = False

    def __init__(self, theta: Any) -> None:
        self.theta, self.calls = theta, 0

    def call(self, function: Any, *inputs: Any) -> Any:
        """See `Program`."""
        self.calls += 1
        tensors = tf.nest.map_structure(_tensor, inputs)
        return function(self.theta, *tensors, StepContext(mode="decode"))


def _tensor(value: Any) -> Any:
    return None if value is None else tf.convert_to_tensor(value)
