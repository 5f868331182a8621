"""Scans on a mesh, as two forward-only loops: one for the values, one for the gradients.

    forward   state, y = body(theta, state, x)        in every iteration; the states are saved
    backward  the iterations in reverse: recomputes the body from its saved state, under a tape

What the body reads from outside, besides its arguments, has gradients as theta has them.

DTensor cannot partition the tensor lists that TensorFlow's own gradient of a while loop uses.
Saved and stacked values are therefore written into buffers, which take the layout of these values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import closures, loops, outer_tensors
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.workarounds.tensors import loop_inputs
from tekso.framework.nests import filled, has_gradient, tensors
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen
from tekso.framework.source_lines import place_of
from tekso.framework.while_loops import while_loop

Flat = list[tf.Tensor]


def scan(
    ctx: MeshContext,
    body: Callable[..., tuple[Any, Any]],
    theta: Mapping[str, Any],
    state: Any,
    xs: Any,
    first: int,
    *,
    kind: type[Loop] | None = None,
) -> tuple[Any, Any]:
    """See `ops.scan`; xs has no weights (see `unrolled`); `kind` is another kind of loop."""
    num_iterations = loops.iterations_of(xs)
    theta_axes = ctx.layouts_of(theta)
    structure: dict[str, Any] = {}
    # Each call begins with the same variables; the changes of the first one stay.
    kept = closures.frozen(body)
    calls = itertools.chain([body], map(closures.frozen, itertools.repeat(kept)))

    def iteration(
        index: tf.Tensor, theta_: Flat, state_: Flat, x_: Flat
    ) -> tuple[Flat, Flat, Flat]:
        """Runs one iteration on flat lists; returns state, stacked and summed outputs."""
        weights = tf.nest.pack_sequence_as(theta, loop_inputs(theta_))
        x = tf.nest.pack_sequence_as(xs, x_)
        inner = ctx.iteration(index + first)
        inner.register_layouts(weights, theta_axes)
        before = tf.nest.pack_sequence_as(state, loop_inputs(state_))
        after, y = next(calls)(weights, before, x, inner)
        tf.nest.map_structure(loops.check_same, before, after)
        sums = inner.collected.sums
        stacked = (y, {"statistic": sums["statistic"]})
        summed = {kind: value for kind, value in sums.items() if kind != "statistic"}
        structure.update(stacked=stacked, summed=summed)
        return tf.nest.flatten(after), tensors(stacked), tensors(summed)

    what = f"ops.scan: the body{place_of(body)}"
    loop = (kind or Loop)(ctx, iteration, num_iterations, theta_axes, what=what)
    inputs = (loop_inputs(tf.nest.flatten(nest)) for nest in (theta, state, xs))
    after, stacked, summed = loop.run(*inputs)
    y, statistics = filled(structure["stacked"], stacked)
    ctx.collected.merge(filled(structure["summed"], summed))
    ctx.collected.merge(statistics)
    return tf.nest.pack_sequence_as(state, after), y


class Loop:
    """The forward and the backward loop, on flat lists.

    Args:
      ctx: context of the loop.
      iteration: `iteration(index, theta, state, x)` returns state, stacked and summed outputs.
      num_iterations: number of iterations.
      theta_axes: layouts of the weights.
      what: the body, for messages.
    """

    def __init__(
        self,
        ctx: MeshContext,
        iteration: Callable[[tf.Tensor, Flat, Flat, Flat], tuple[Flat, Flat, Flat]],
        num_iterations: int,
        theta_axes: list[Any],
        *,
        what: str = "the body",
    ) -> None:
        self._ctx, self._iteration, self._num_iterations = ctx, iteration, num_iterations
        self._theta_axes, self._what = theta_axes, what
        self._reads: outer_tensors.Reads  # of the first trace, which `_outputs` makes
        self._outer: Flat = []  # tensors from outside that learn

    def run(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat, Flat]:
        """Returns the final state, the stacked outputs and the summed outputs."""
        shapes = self._outputs(theta, state, xs)
        if not self._ctx.is_training:
            return self._forward(theta, state, xs, shapes)[0]
        outer = loop_inputs(self._outer)
        given = len(theta), len(state), len(xs)
        made = len(state), len(shapes[0]), len(shapes[1])

        @custom_gradient
        def loop(*args: tf.Tensor) -> Any:
            theta, state, xs = split(args, given)  # the loop reads the others from outside
            outputs, saved = self._forward(theta, state, xs, shapes)

            def grad(*gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
                return self._backward(theta, xs, saved, split(gradients, made), outputs)

            return joined(outputs), grad

        found: tuple[Flat, Flat, Flat] = split(loop(*theta, *state, *xs, *outer), made)
        return found

    def _outputs(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat]:
        """Traces one iteration separately; returns its stacked and its summed outputs.

        Only the types and shapes of these tensors may be used. Also finds what else it reads.
        """
        found: list[tuple[Flat, Flat]] = []

        def probe() -> None:
            first = tf.constant(0)
            inputs = [_made_here(flat) for flat in (theta, state, read(xs, first))]
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            after, stacked, summed = self._iteration(first, *inputs)
            _made_here(after)
            found.append((_made_here(stacked), _made_here(summed)))
            ops = graph.get_operations()[before:]
            self._reads = outer_tensors.Reads.of(ops, [first, *joined(inputs)])

        graph = tf.function(probe, autograph=False).get_concrete_function().graph
        outside = [outer for outer, _ in graph.captures]
        self._outer = outer_tensors.learned(outside, [*theta, *state, *xs])
        return found[0]

    def _forward(
        self, theta: Flat, state: Flat, xs: Flat, shapes: tuple[Flat, Flat]
    ) -> tuple[tuple[Flat, Flat, Flat], Flat]:
        """Returns the outputs and, in training, what is saved of every iteration."""
        saved = self._buffers(
            self._saved(theta, state, xs, shapes) if self._ctx.is_training else []
        )
        stacks = self._buffers(shapes[0])
        sums = [tf.zeros(v.shape, v.dtype) for v in shapes[1]]

        def body(i: Any, state: Flat, saved: Flat, stacks: Flat, sums: Flat) -> Any:
            if saved:
                (state, ys, more), own = self._iteration_and_saved(i, theta, state, read(xs, i))
                saved = _write(saved, i, own)
            else:
                state, ys, more = self._iteration(i, theta, state, read(xs, i))
            return i + 1, state, saved, _write(stacks, i, ys), _add(sums, more)

        _, state, saved, stacks, sums = while_loop(
            lambda i, *_: i < self._num_iterations,
            body,
            (tf.constant(0), state, saved, stacks, sums),
            maximum_iterations=self._num_iterations,
        )
        return (state, stacks, sums), saved

    def _saved(
        self, theta: Flat, state: Flat, xs: Flat, shapes: tuple[Flat, Flat]
    ) -> Sequence[tf.TensorSpec | tf.Tensor]:
        """Returns the types and shapes of what an iteration saves: its state."""
        return state

    def _iteration_and_saved(
        self, index: tf.Tensor, theta: Flat, state: Flat, x: Flat
    ) -> tuple[tuple[Flat, Flat, Flat], Flat]:
        """Returns the results of an iteration, and what its backward pass needs."""
        return self._iteration(index, theta, state, x), state

    def _iteration_gradients(
        self, index: tf.Tensor, theta: Flat, saved: Flat, x: Flat, seeds: Flat
    ) -> tuple[Flat, Flat, Flat]:
        """Returns the gradients of weights, state and x, given those of all float outputs.

        Those of tensors from outside follow those of the weights.
        """
        return self.differentiated(index, theta, saved, x, seeds)[1]

    def differentiated(
        self, index: tf.Tensor, theta: Flat, state: Flat, x: Flat, seeds: Flat
    ) -> tuple[Flat, tuple[Flat, Flat, Flat]]:
        """Returns the results of an iteration, and the gradients of weights, state and x."""
        inputs = theta, state, x
        weights, *rest = (learning(flat) for flat in inputs)
        watched = [[*weights, *self._outer], *rest]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([weights, rest])
            outer_tensors.watch(tape, self._outer)
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            outputs = _made_here(joined(self._iteration(index, *inputs)))
            ops = graph.get_operations()[before:]
        later = outer_tensors.Reads.of(ops, [index, *joined(inputs)])
        if more := outer_tensors.new_reads(self._reads.outer, later.outer):
            outer_tensors.refuse(more, self._what)
        self._reads.refuse_other_ops(later, self._what)
        dtheta, dstate, dx = tape.gradient(
            learning(outputs),
            watched,
            output_gradients=seeds,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        count = len(weights)
        dtheta = [*self._constrained(dtheta[:count], theta), *dtheta[count:]]
        return outputs, (dtheta, dstate, dx)

    def _backward(
        self,
        theta: Flat,
        xs: Flat,
        saved: Flat,
        gradients: tuple[list[tf.Tensor | None], ...],
        outputs: tuple[Flat, Flat, Flat],
    ) -> list[tf.Tensor | None]:
        dafter, dstacked, dsummed = (
            [
                tf.zeros_like(y) if d is None else d
                for d, y in zip(ds, ys, strict=True)
                if has_gradient(y)
            ]
            for ds, ys in zip(gradients, outputs, strict=True)
        )

        def body(i: Any, dtheta: Flat, dstate: Flat, dxs: Flat) -> Any:
            seeds = [*loop_inputs(dstate), *read(dstacked, i), *loop_inputs(dsummed)]
            more, dstate, dx = self._iteration_gradients(
                i, theta, read(saved, i), read(xs, i), seeds
            )
            return i - 1, _add(dtheta, more), dstate, _write(dxs, i, dx)

        # Gradients of weights are summed over the iterations in float32, as the plain loop does.
        weights = [*learning(theta), *self._outer]
        dtheta = [widen(tf.zeros_like(t)) for t in weights]
        dxs = [tf.zeros_like(t) for t in learning(xs)]
        _, dtheta, dstate, dxs = while_loop(
            lambda i, *_: i >= 0,
            body,
            (tf.constant(self._num_iterations - 1), dtheta, dafter, dxs),
            maximum_iterations=self._num_iterations,
        )
        dtheta = [tf.cast(d, t.dtype) for d, t in zip(dtheta, weights, strict=True)]
        count = len(learning(theta))
        found = iter([*dtheta[:count], *dstate, *dxs])
        inputs = (*theta, *outputs[0], *xs)  # the final state has the types of the first one
        return [*(next(found) if has_gradient(t) else None for t in inputs), *dtheta[count:]]

    def _constrained(self, gradients: Flat, theta: Flat) -> Flat:
        """Returns the gradients of weights, sharded as the weights are."""
        axes = [a for t, a in zip(theta, self._theta_axes, strict=True) if has_gradient(t)]
        return [
            d if a is None else self._ctx.reshard(tf.convert_to_tensor(d), a)
            for d, a in zip(gradients, axes, strict=True)
        ]

    def _buffers(self, values: Sequence[tf.TensorSpec | tf.Tensor]) -> Flat:
        return [tf.zeros([self._num_iterations, *v.shape], v.dtype) for v in values]


def _made_here(flat: Flat) -> Flat:
    """Returns tensors that ops of this graph make: one may be returned as it is outside."""
    return [tf.identity(t) for t in flat]


def read(buffers: Flat, index: tf.Tensor) -> Flat:
    """Returns the rows of buffers at an index."""
    return [_row(buffer, index) for buffer in buffers]


def _row(buffer: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns a row of a buffer.

    Not by tf.gather: if the buffer of another program is not sharded, but its row is, DTensor does
    not compile a gather.
    """
    begin = tf.concat([tf.reshape(index, [1]), tf.zeros([buffer.shape.rank - 1], tf.int32)], 0)
    return tf.squeeze(tf.slice(buffer, begin, [1, *buffer.shape[1:]]), 0)


def _write(buffers: Flat, index: tf.Tensor, values: Flat) -> Flat:
    place = tf.reshape(index, [1, 1])
    return [
        tf.tensor_scatter_nd_update(buffer, place, tf.expand_dims(value, 0))
        for buffer, value in zip(buffers, values, strict=True)
    ]


def _add(totals: Flat, more: Flat) -> Flat:
    return [a + tf.cast(b, a.dtype) for a, b in zip(totals, more, strict=True)]


def learning(flat: Iterable[tf.Tensor]) -> Flat:
    """Returns the tensors that have gradients."""
    return [t for t in flat if has_gradient(t)]


def joined(parts: Iterable[Flat]) -> Flat:
    """Returns the tensors of several lists as one list."""
    return [t for part in parts for t in part]


def split(flat: Any, counts: tuple[int, ...]) -> Any:
    """Returns lists of these lengths, the parts of one list."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(flat[start : start + count]))
        start += count
    return tuple(parts)
