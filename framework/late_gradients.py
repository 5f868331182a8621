"""Gradients of the weights that the iterations of a loop share, as one product after the loop.

TensorFlow's own gradient of a while loop multiplies the few rows of every iteration, and adds up
the results in a tensor of the size of the weight. Here, every projection of the body gets a tensor
of zeros, whose gradient is that of the product. The loop stacks these gradients, and the inputs of
the projections. The weight's gradient is the product of the two stacks:

    forward    zeros = f(w);  for t: y_t = x_t w + zeros_t       x_t are stacked
    backward   for t, in reverse: dzeros_t = dy_t;  then  dw = sum over t of x_t^T dy_t
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.context import Context, StepContext
from tekso.framework.primitives import projection
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.products import product
from tekso.framework.theta import Theta


class _Call(NamedTuple):
    """A projection in the body of a loop."""

    weight: tf.Tensor
    x: tf.Tensor
    shape: list[int]
    num_inputs: int


class LateGradients:
    """The gradients of the weights of one loop.

    Args:
      ctx: the context of the loop.
      theta: the weights that all iterations share.
    """

    def __init__(self, ctx: StepContext, theta: Theta) -> None:
        is_useful = ctx.is_training and not tf.executing_eagerly() and "project" not in ctx.forms
        leaves = tf.nest.flatten(theta) if is_useful else []
        # The loop adds up gradients of 16-bit weights in float32.
        wide = tf.float32, tf.float64
        self._weights = [t for t in leaves if isinstance(t, tf.Tensor) and t.dtype in wide]
        self._fuse = ctx.fuse
        self._calls: list[_Call] = []
        self._zeros: list[tf.Tensor] = []
        self._transposed: list[tf.Tensor] = []
        self._stacks: list[tf.Tensor] = []
        self._graph: Any = None
        self._is_traced = False

    def deferring(self, ctx: StepContext) -> StepContext:
        """Returns the context with which the body is traced; changes and returns `ctx`."""
        if self._weights:
            ctx.forms = {**ctx.forms, "project": self._project}
        return ctx

    def start(self, zeros: Sequence[tf.Tensor] = ()) -> None:
        """Starts to trace an iteration, in the graph of the caller, with the zeros of each call."""
        self._calls, self._zeros = [], list(zeros)
        self._graph = tf.compat.v1.get_default_graph()
        self._is_traced = False

    def stop(self) -> None:
        """Takes that the iteration is traced: only the loop asks for gradients from now on."""
        self._is_traced = True

    def inputs(self) -> list[tf.Tensor]:
        """Returns the inputs of the projections of the iteration."""
        return [call.x for call in self._calls]

    def zeros(self, num_iterations: int) -> list[tf.Tensor]:
        """Returns the zeros for every projection of the iteration that was traced, stacked."""
        # Transposed once: a product with a transposed operand is slower where rows are few.
        self._transposed = [
            tf.transpose(tf.reshape(call.weight, [call.num_inputs, -1])) for call in self._calls
        ]
        return [self._zero(i, num_iterations, call) for i, call in enumerate(self._calls)]

    def finish(self, inputs: list[tf.Tensor]) -> None:
        """Takes the stacks of the inputs of the projections."""
        self._stacks = inputs

    def _project(
        self,
        ctx: StepContext,
        x: tf.Tensor,
        w: tf.Tensor,
        b: tf.Tensor | None = None,
        *,
        num_contracted: int = 1,
    ) -> tf.Tensor:
        num_inputs = math.prod(w.shape[:num_contracted])
        leading = x.shape[: x.shape.rank - num_contracted]
        fits = x.shape[leading.rank :] == w.shape[:num_contracted]  # otherwise `project` says why
        # A graph within the iteration, as of a condition, has no tensors for the loop to stack.
        # Products with many rows are efficient, and the stack of their gradients would be large.
        if (
            tf.compat.v1.get_default_graph() is not self._graph
            or not any(w is known for known in self._weights)
            or not fits
            or not leading.is_fully_defined()
            or leading.num_elements() > num_inputs
        ):
            return projection.project(x, w, b, num_contracted=num_contracted, fuse=ctx.fuse)
        shape = [*leading, *w.shape[num_contracted:]]
        number = len(self._calls)
        self._calls.append(_Call(w, x, shape, num_inputs))
        if not self._zeros:  # the first trace, only for the shapes of what the body returns
            return projection.project(x, w, b, num_contracted=num_contracted, fuse=ctx.fuse)
        matrix = tf.reshape(w, [num_inputs, -1])
        zeros = tf.reshape(self._zeros[number], [-1, matrix.shape[1]])
        rows = tf.reshape(x, [-1, num_inputs])
        y = self._product(rows, zeros, matrix, self._transposed[number])
        y = tf.reshape(y, shape)
        return y if b is None else y + b

    def _product(self, x: tf.Tensor, zeros: tf.Tensor, w: tf.Tensor, transposed: tf.Tensor) -> Any:
        """Returns x w; the zeros have its gradient, and the weight has none.

        A tape of the body itself needs the gradient of the weight at once, and may differentiate
        the gradient of x with regard to it.
        """

        @custom_gradient
        def run(x: tf.Tensor, zeros: tf.Tensor, w: tf.Tensor, transposed: tf.Tensor) -> Any:
            def grad(dy: tf.Tensor) -> list[tf.Tensor | None]:
                if self._is_traced:
                    return [tf.matmul(dy, transposed), dy, None, None]
                dw = product(x, dy, transpose_a=True, fuse=self._fuse)
                return [product(dy, w, transpose_b=True, fuse=self._fuse), dy, dw, None]

            return tf.matmul(x, w), grad

        return run(x, zeros, w, transposed)

    def _zero(self, number: int, num_iterations: int, call: _Call) -> tf.Tensor:
        @custom_gradient
        def run(w: tf.Tensor) -> Any:
            def grad(dy: tf.Tensor) -> tf.Tensor:
                x = tf.reshape(self._stacks[number], [-1, call.num_inputs])
                rows = tf.reshape(dy, [x.shape[0], -1])
                return tf.reshape(product(x, rows, transpose_a=True, fuse=self._fuse), w.shape)

            return tf.zeros([num_iterations, *call.shape], w.dtype), grad

        return run(call.weight)


def without_late_gradients(ctx: Context) -> Context:
    """Returns the context without late gradients; changes and returns `ctx`.

    A function with a gradient of its own must not use tensors that are not among its arguments.
    """
    if isinstance(getattr(ctx.forms.get("project"), "__self__", None), LateGradients):
        ctx.forms = {name: form for name, form in ctx.forms.items() if name != "project"}
    return ctx
