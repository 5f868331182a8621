"""The loop over depth or time on a mesh: two forward-only while loops, one of them the gradient.

    forward   state, y = body(theta, state, x)        for every turn; the states are kept
    backward  the turns in reverse: the body once more, under a tape, from the state that was kept

DTensor cannot lay out the lists that TensorFlow's own gradient of a while loop keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.theta import Theta

Flat = list[tf.Tensor]


def scan(
    ctx: Any, body: Callable[..., tuple[Any, Any]], theta: Theta, state: Any, xs: Any
) -> tuple[Any, Any]:
    """See `StepContext.scan`."""
    turns = tf.nest.flatten(xs)[0].shape[0]
    theta_axes = ctx.all_weight_axes(theta)
    # A slice of a stacked weight lies as the weight does, without the stack dim.
    xs_axes = [axes and axes[1:] for axes in ctx.all_weight_axes(xs)]
    structure: dict[str, Any] = {}

    def turn(index: tf.Tensor, theta_: Flat, state_: Flat, x_: Flat) -> tuple[Flat, Flat, Flat]:
        """One turn, on flat lists: state, what is stacked by turn, what is added up."""
        weights = tf.nest.pack_sequence_as(theta, theta_)
        x = tf.nest.pack_sequence_as(xs, x_)
        inner = ctx.isolated().fold(index)
        inner.know(weights, theta_axes)
        inner.know(x, xs_axes)
        after, y = body(weights, tf.nest.pack_sequence_as(state, state_), x, inner)
        sums = inner.collected.sums
        stacked = (y, {"statistic": sums["statistic"]})
        summed = {kind: value for kind, value in sums.items() if kind != "statistic"}
        structure.update(stacked=stacked, summed=summed)
        after = [_like(a, b) for a, b in zip(tf.nest.flatten(after), state_, strict=True)]
        return after, _present(stacked), _present(summed)

    theta_, state_, xs_ = (tf.nest.flatten(nest) for nest in (theta, state, xs))
    loop = _Loop(ctx, turn, turns, theta_, state_, xs_, theta_axes, xs_axes)
    after, stacked, summed = loop.run()
    y, statistics = _fill(structure["stacked"], stacked)
    ctx.collected.merge(_fill(structure["summed"], summed))
    ctx.collected.merge(statistics)
    return tf.nest.pack_sequence_as(state, after), y


class _Loop:
    """The two loops, over flat lists."""

    def __init__(
        self,
        ctx: Any,
        turn: Callable[..., tuple[Flat, Flat, Flat]],
        turns: int,
        theta: Flat,
        state: Flat,
        xs: Flat,
        theta_axes: list[Any],
        xs_axes: list[Any],
    ) -> None:
        self._ctx, self._turn, self._turns = ctx, turn, turns
        self._theta, self._state, self._xs = theta, state, xs
        self._theta_axes, self._xs_axes = theta_axes, xs_axes

    def run(self) -> tuple[Flat, Flat, Flat]:
        """Returns the last state, the stacked and the summed outputs."""
        counts = len(self._theta), len(self._state), len(self._xs)

        @tf.custom_gradient
        def loop(*args: tf.Tensor) -> Any:
            theta, state, xs = _split(args, counts)
            after, stacked, summed, kept = self._forward(theta, state, xs)
            sizes = len(after), len(stacked), len(summed)

            def grad(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
                return self._backward(theta, xs, kept, *_split(gradients, sizes))

            self._sizes = sizes
            return [*after, *stacked, *summed], grad

        outputs = loop(*self._theta, *self._state, *self._xs)
        return _split(outputs, self._sizes)

    def _forward(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat, Flat, Flat]:
        # The first turn stands before the loop: it tells what the body returns, and how that lies.
        first = [self._read(x, tf.constant(0)) for x in xs]
        after, stacked, summed = self._turn(tf.constant(0), theta, state, first)
        keep = state if self._ctx.is_training else []
        kept = [self._buffer(s) for s in keep]
        stacks = [self._buffer(y) for y in stacked]

        def body(i: Any, state: Flat, kept: Flat, stacks: Flat, summed: Flat) -> Any:
            x = [self._read(x, i) for x in xs]
            kept = [_write(buffer, i, s) for buffer, s in zip(kept, state, strict=False)]
            after, ys, more = self._turn(i, theta, state, x)
            stacks = [_write(buffer, i, y) for buffer, y in zip(stacks, ys, strict=True)]
            return i + 1, after, kept, stacks, [a + b for a, b in zip(summed, more, strict=True)]

        if self._turns == 1:
            return after, stacks, summed, kept
        _, after, kept, stacks, summed = tf.while_loop(
            lambda i, *_: i < self._turns,
            body,
            (tf.constant(1), after, kept, stacks, summed),
            maximum_iterations=self._turns - 1,
        )
        return after, stacks, summed, kept

    def _backward(
        self, theta: Flat, xs: Flat, kept: Flat, dafter: Flat, dstacked: Flat, dsummed: Flat
    ) -> list[tf.Tensor | None]:
        is_float = [[t.dtype.is_floating for t in flat] for flat in (theta, kept, xs)]

        def turn_gradients(i: tf.Tensor, dstate: Flat) -> tuple[Flat, Flat, Flat]:
            state = [tf.gather(buffer, i) for buffer in kept]
            x = [self._read(x, i) for x in xs]
            watched = [
                [t for t, flag in zip(flat, flags, strict=True) if flag]
                for flat, flags in zip((theta, state, x), is_float, strict=True)
            ]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                outputs = self._turn(i, theta, state, x)
            gradients = (dstate, [tf.gather(d, i) for d in dstacked], dsummed)
            pairs = [
                (y, d)
                for ys, ds in zip(outputs, gradients, strict=True)
                for y, d in zip(ys, ds, strict=True)
                if y.dtype.is_floating
            ]
            found = tape.gradient(
                [y for y, _ in pairs],
                watched,
                output_gradients=[d for _, d in pairs],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            dtheta = [
                self._pin(d, a)
                for d, a in zip(found[0], _floats(self._theta_axes, is_float[0]), strict=True)
            ]
            dx = [
                self._pin(d, a)
                for d, a in zip(found[2], _floats(self._xs_axes, is_float[2]), strict=True)
            ]
            found_state = iter(found[1])
            dbefore = [
                next(found_state) if f else d for f, d in zip(is_float[1], dstate, strict=True)
            ]
            return dtheta, [_like(d, s) for d, s in zip(dbefore, state, strict=True)], dx

        last = tf.constant(self._turns - 1)
        dtheta, dstate, dx = turn_gradients(last, dafter)
        dxs = [_write(self._buffer(d), last, d) for d in dx]

        def body(i: Any, dtheta: Flat, dstate: Flat, dxs: Flat) -> Any:
            more, dstate, dx = turn_gradients(i, dstate)
            dtheta = [a + b for a, b in zip(dtheta, more, strict=True)]
            return i - 1, dtheta, dstate, [_write(b, i, d) for b, d in zip(dxs, dx, strict=True)]

        if self._turns > 1:
            _, dtheta, dstate, dxs = tf.while_loop(
                lambda i, *_: i >= 0,
                body,
                (last - 1, dtheta, dstate, dxs),
                maximum_iterations=self._turns - 1,
            )
        dstate = [d for d, flag in zip(dstate, is_float[1], strict=True) if flag]
        found = iter([*dtheta, *dstate, *dxs])
        return [next(found) if flag else None for flags in is_float for flag in flags]

    def _read(self, x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, index)

    def _pin(self, x: tf.Tensor, axes: Any) -> tf.Tensor:
        return x if axes is None else self._ctx.pin(x, axes)

    def _buffer(self, first: tf.Tensor) -> tf.Tensor:
        """[turns, ...] laid out as `first` is, which stands in every turn until it is written."""
        return tf.repeat(tf.expand_dims(first, 0), self._turns, 0)


def _write(buffer: tf.Tensor, index: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(buffer, tf.reshape(index, [1, 1]), tf.expand_dims(value, 0))


def _like(x: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return dtensor.relayout_like(x, other)


def _floats(axes: list[Any], flags: list[bool]) -> list[Any]:
    return [a for a, flag in zip(axes, flags, strict=True) if flag]


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
