"""A task with a recurrence, written as a scan, as a loop of TensorFlow, or without a loop.

y = x w                    x [batch, time, inputs]
s(t) = tanh(s(t-1) u + y(t)),  s(-1) = 0
loss = sum of s v over all examples and times
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.initializers import Zeros
from tekso.framework.params import REQUIRED, param
from tekso.framework.signature import Signature
from tekso.framework.task import LossSums, Task

BATCH, TIME, INPUTS, UNITS, OUTPUTS = 8, 5, 3, 7, 2
SIGNATURE: Signature = {"x": ((BATCH, TIME, INPUTS), "float32")}
# The batch gets no gradient, so that the first product has one pass less.
PRODUCTS = 2 * INPUTS * UNITS + 3 * UNITS * UNITS + 3 * UNITS * OUTPUTS
FLOPS = 2 * BATCH * TIME * PRODUCTS
"""Floating-point operations of all products, if no loop is recomputed."""
WEIGHTS = INPUTS * UNITS + UNITS * UNITS + UNITS * OUTPUTS


class Recurrence(Task):
    """See the file."""

    class Params(Task.Params):
        kind: Literal["scan", "constrained_scan", "loop", "unrolled"] = param(
            "How it is written.", default=REQUIRED
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name, shape in (
            ("w", [INPUTS, UNITS]), ("u", [UNITS, UNITS]), ("v", [UNITS, OUTPUTS]),
        ):  # fmt: skip
            self.weight(name, shape, dims=(None, None), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        rows = tf.transpose(tf.matmul(batch["x"], theta.w), [1, 0, 2])
        states = getattr(self, f"_{self.params.kind}")(theta, rows, ctx)
        return LossSums(tf.reduce_sum(tf.matmul(states, theta.v)))

    def _scan(self, theta: Any, rows: tf.Tensor, ctx: Any) -> tf.Tensor:
        def body(theta: Any, state: Any, x: Any, ctx: Any) -> Any:
            state = tf.tanh(tf.matmul(state, theta["u"]) + x)
            return state, state

        start = tf.zeros_like(rows[0])
        if self.params.kind == "constrained_scan":
            start = ctx.constrain(start, ("batch", None))
        return ops.scan(ctx, body, {"u": theta.u}, start, rows)[1]

    _constrained_scan = _scan

    def _loop(self, theta: Any, rows: tf.Tensor, ctx: Any) -> tf.Tensor:
        def body(t: Any, state: Any, states: Any) -> Any:
            state = tf.tanh(tf.matmul(state, theta.u) + rows[t])
            return t + 1, state, states.write(t, state)

        states = tf.TensorArray(rows.dtype, size=TIME, element_shape=rows.shape[1:])
        start = (0, tf.zeros_like(rows[0]), states)
        return tf.while_loop(lambda t, *_: t < TIME, body, start, maximum_iterations=TIME)[
            2
        ].stack()

    def _unrolled(self, theta: Any, rows: tf.Tensor, ctx: Any) -> tf.Tensor:
        states = [tf.zeros_like(rows[0])]
        for x in tf.unstack(rows):
            states.append(tf.tanh(tf.matmul(states[-1], theta.u) + x))
        return tf.stack(states[1:])
