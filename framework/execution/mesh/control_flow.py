"""Scans on a mesh, as two forward-only loops: one for the values, one for the gradients.

    forward   state, y = body(theta, state, x)        in every iteration; the states are saved
    backward  the iterations in reverse: recomputes the body from its saved state, under a tape

DTensor cannot partition the tensor lists that TensorFlow's own gradient of a while loop uses.
Saved and stacked values are therefore written into buffers, which take the layout of these values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import loops
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.workarounds.tensors import loop_inputs
from tekso.framework.primitives.precision import widen

Flat = list[tf.Tensor]


def scan(
    ctx: MeshContext,
    body: Callable[..., tuple[Any, Any]],
    theta: Mapping[str, Any],
    state: Any,
    xs: Any,
    first: int,
) -> tuple[Any, Any]:
    """See `ops.scan`; xs has no weights (see `unrolled`)."""
    num_iterations = loops.iterations_of(xs)
    theta_axes = ctx.layouts_of(theta)
    structure: dict[str, Any] = {}

    def iteration(
        index: tf.Tensor, theta_: Flat, state_: Flat, x_: Flat
    ) -> tuple[Flat, Flat, Flat]:
        """Runs one iteration on flat lists; returns state, stacked and summed outputs."""
        weights = tf.nest.pack_sequence_as(theta, loop_inputs(theta_))
        x = tf.nest.pack_sequence_as(xs, x_)
        inner = ctx.iteration(index + first)
        inner.register_layouts(weights, theta_axes)
        before = tf.nest.pack_sequence_as(state, loop_inputs(state_))
        after, y = body(weights, before, x, inner)
        tf.nest.map_structure(loops.check_same, before, after)
        sums = inner.collected.sums
        stacked = (y, {"statistic": sums["statistic"]})
        summed = {kind: value for kind, value in sums.items() if kind != "statistic"}
        structure.update(stacked=stacked, summed=summed)
        return tf.nest.flatten(after), _present(stacked), _present(summed)

    loop = _Loop(ctx, iteration, num_iterations, theta_axes)
    inputs = (loop_inputs(tf.nest.flatten(nest)) for nest in (theta, state, xs))
    after, stacked, summed = loop.run(*inputs)
    y, statistics = _fill(structure["stacked"], stacked)
    ctx.collected.merge(_fill(structure["summed"], summed))
    ctx.collected.merge(statistics)
    return tf.nest.pack_sequence_as(state, after), y


class _Loop:
    """The forward and the backward loop, on flat lists."""

    def __init__(
        self,
        ctx: MeshContext,
        iteration: Callable[[tf.Tensor, Flat, Flat, Flat], tuple[Flat, Flat, Flat]],
        num_iterations: int,
        theta_axes: list[Any],
    ) -> None:
        self._ctx, self._iteration, self._num_iterations = ctx, iteration, num_iterations
        self._theta_axes = theta_axes

    def run(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat, Flat]:
        """Returns the final state, the stacked outputs and the summed outputs."""
        shapes = self._outputs(theta, state, xs)
        if not self._ctx.is_training:
            return self._forward(theta, state, xs, shapes)[0]
        given = len(theta), len(state), len(xs)
        made = len(state), len(shapes[0]), len(shapes[1])

        @tf.custom_gradient
        def loop(*args: tf.Tensor) -> Any:
            theta, state, xs = _split(args, given)
            outputs, saved = self._forward(theta, state, xs, shapes)

            def grad(*gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
                return self._backward(theta, xs, saved, _split(gradients, made), outputs)

            return _joined(outputs), grad

        return _split(loop(*theta, *state, *xs), made)

    def _outputs(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat]:
        """Traces one iteration separately; returns its stacked and its summed outputs.

        Only the types and shapes of these tensors may be used.
        """
        found: list[tuple[Flat, Flat]] = []

        def probe() -> None:
            first = tf.constant(0)
            found.append(self._iteration(first, theta, state, _read(xs, first))[1:])

        tf.function(probe, autograph=False).get_concrete_function()
        return found[0]

    def _forward(
        self, theta: Flat, state: Flat, xs: Flat, shapes: tuple[Flat, Flat]
    ) -> tuple[tuple[Flat, Flat, Flat], Flat]:
        """Returns the outputs and, in training, the saved states before every iteration."""
        saved = self._buffers(state if self._ctx.is_training else [])
        stacks = self._buffers(shapes[0])
        sums = [tf.zeros(v.shape, v.dtype) for v in shapes[1]]

        def body(i: Any, state: Flat, saved: Flat, stacks: Flat, sums: Flat) -> Any:
            if saved:
                saved = _write(saved, i, state)
            state, ys, more = self._iteration(i, theta, state, _read(xs, i))
            return i + 1, state, saved, _write(stacks, i, ys), _add(sums, more)

        _, state, saved, stacks, sums = tf.while_loop(
            lambda i, *_: i < self._num_iterations,
            body,
            (tf.constant(0), state, saved, stacks, sums),
            maximum_iterations=self._num_iterations,
        )
        return (state, stacks, sums), saved

    def _backward(
        self,
        theta: Flat,
        xs: Flat,
        saved: Flat,
        gradients: tuple[list[tf.Tensor | None], ...],
        outputs: tuple[Flat, Flat, Flat],
    ) -> list[tf.Tensor | None]:
        dafter, dstacked, dsummed = (
            [tf.zeros_like(y) if d is None else d for d, y in zip(ds, ys, strict=True) if _has(y)]
            for ds, ys in zip(gradients, outputs, strict=True)
        )

        def iteration_gradients(i: tf.Tensor, dstate: Flat) -> tuple[Flat, Flat, Flat]:
            inputs = theta, _read(saved, i), _read(xs, i)
            watched = [_learning(flat) for flat in inputs]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                outputs = _joined(self._iteration(i, *inputs))
            dtheta, dbefore, dx = tape.gradient(
                _learning(outputs),
                watched,
                output_gradients=[*loop_inputs(dstate), *_read(dstacked, i), *dsummed],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return self._constrained(dtheta, theta), dbefore, dx

        def body(i: Any, dtheta: Flat, dstate: Flat, dxs: Flat) -> Any:
            more, dstate, dx = iteration_gradients(i, dstate)
            return i - 1, _add(dtheta, more), dstate, _write(dxs, i, dx)

        # Gradients of weights are summed over the iterations in float32, as the plain loop does.
        dtheta = [widen(tf.zeros_like(t)) for t in _learning(theta)]
        dxs = [tf.zeros_like(t) for t in _learning(xs)]
        _, dtheta, dstate, dxs = tf.while_loop(
            lambda i, *_: i >= 0,
            body,
            (tf.constant(self._num_iterations - 1), dtheta, dafter, dxs),
            maximum_iterations=self._num_iterations,
        )
        dtheta = [tf.cast(d, t.dtype) for d, t in zip(dtheta, _learning(theta), strict=True)]
        found = iter([*dtheta, *dstate, *dxs])
        return [next(found) if _has(t) else None for t in [*theta, *saved, *xs]]

    def _constrained(self, gradients: Flat, theta: Flat) -> Flat:
        """Returns the gradients of weights, sharded as the weights are."""
        axes = [a for t, a in zip(theta, self._theta_axes, strict=True) if _has(t)]
        return [
            d if a is None else self._ctx.reshard(tf.convert_to_tensor(d), a)
            for d, a in zip(gradients, axes, strict=True)
        ]

    def _buffers(self, values: Flat) -> Flat:
        return [tf.zeros([self._num_iterations, *v.shape], v.dtype) for v in values]


def _read(buffers: Flat, index: tf.Tensor) -> Flat:
    return [tf.gather(buffer, index) for buffer in buffers]


def _write(buffers: Flat, index: tf.Tensor, values: Flat) -> Flat:
    place = tf.reshape(index, [1, 1])
    return [
        tf.tensor_scatter_nd_update(buffer, place, tf.expand_dims(value, 0))
        for buffer, value in zip(buffers, values, strict=True)
    ]


def _add(totals: Flat, more: Flat) -> Flat:
    return [a + tf.cast(b, a.dtype) for a, b in zip(totals, more, strict=True)]


def _has(x: tf.Tensor) -> bool:
    """Returns whether x has a gradient."""
    return bool(x.dtype.is_floating)


def _learning(flat: Iterable[tf.Tensor]) -> Flat:
    return [t for t in flat if _has(t)]


def _joined(parts: Iterable[Flat]) -> Flat:
    return [t for part in parts for t in part]


def _split(flat: Any, counts: tuple[int, ...]) -> Any:
    parts, start = [], 0
    for count in counts:
        parts.append(list(flat[start : start + count]))
        start += count
    return tuple(parts)


def _present(nest: Any) -> Flat:
    return [value for value in tf.nest.flatten(nest) if value is not None]


def _fill(nest: Any, values: Flat) -> Any:
    given = iter(values)
    flat = [None if v is None else next(given) for v in tf.nest.flatten(nest)]
    return tf.nest.pack_sequence_as(nest, flat)
