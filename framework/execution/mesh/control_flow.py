"""Loops on a mesh. That over depth or time is two forward-only ones, one of them the gradient.

    forward   state, y = body(theta, state, x)        for every turn; the states are kept
    backward  the turns in reverse: the body once more, under a tape, from the state that was kept

DTensor cannot lay out the lists that TensorFlow's own gradient of a while loop keeps; what is kept
or stacked is written into buffers, which take the layout of what is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import loops
from tekso.framework.execution.mesh.context import MeshContext

Flat = list[tf.Tensor]

_numbers = itertools.count()


def scan(
    ctx: MeshContext,
    body: Callable[..., tuple[Any, Any]],
    theta: Mapping[str, Any],
    state: Any,
    xs: Any,
    first: int,
) -> tuple[Any, Any]:
    """See `ops.scan`; xs has no weights (see `unrolled`)."""
    turns = loops.num_turns(xs)
    theta_axes = ctx.layouts_of(theta)
    structure: dict[str, Any] = {}

    def turn(index: tf.Tensor, theta_: Flat, state_: Flat, x_: Flat) -> tuple[Flat, Flat, Flat]:
        """One turn, on flat lists: state, what is stacked by turn, what is added up."""
        weights = tf.nest.pack_sequence_as(theta, own(theta_))
        x = tf.nest.pack_sequence_as(xs, x_)
        inner = ctx.iteration(index + first)
        inner.register_layouts(weights, theta_axes)
        before = tf.nest.pack_sequence_as(state, own(state_))
        after, y = body(weights, before, x, inner)
        tf.nest.map_structure(loops.check_same, before, after)
        sums = inner.collected.sums
        stacked = (y, {"statistic": sums["statistic"]})
        summed = {kind: value for kind, value in sums.items() if kind != "statistic"}
        structure.update(stacked=stacked, summed=summed)
        return tf.nest.flatten(after), _present(stacked), _present(summed)

    loop = _Loop(ctx, turn, turns, theta_axes)
    inputs = (own(tf.nest.flatten(nest)) for nest in (theta, state, xs))
    after, stacked, summed = loop.run(*inputs)
    y, statistics = _fill(structure["stacked"], stacked)
    ctx.collected.merge(_fill(structure["summed"], summed))
    ctx.collected.merge(statistics)
    return tf.nest.pack_sequence_as(state, after), y


class _Loop:
    """The two loops, over flat lists."""

    def __init__(
        self,
        ctx: MeshContext,
        turn: Callable[[tf.Tensor, Flat, Flat, Flat], tuple[Flat, Flat, Flat]],
        turns: int,
        theta_axes: list[Any],
    ) -> None:
        self._ctx, self._turn, self._turns = ctx, turn, turns
        self._theta_axes = theta_axes

    def run(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat, Flat]:
        """Returns the last state, the stacked and the summed outputs."""
        shapes = self._outputs(theta, state, xs)
        if not self._ctx.is_training:
            return self._forward(theta, state, xs, shapes)[0]
        given = len(theta), len(state), len(xs)
        made = len(state), len(shapes[0]), len(shapes[1])

        @tf.custom_gradient
        def loop(*args: tf.Tensor) -> Any:
            theta, state, xs = _split(args, given)
            outputs, kept = self._forward(theta, state, xs, shapes)

            def grad(*gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
                return self._backward(theta, xs, kept, _split(gradients, made), outputs)

            return _joined(outputs), grad

        return _split(loop(*theta, *state, *xs), made)

    def _outputs(self, theta: Flat, state: Flat, xs: Flat) -> tuple[Flat, Flat]:
        """Traces a turn beside the program; returns what it makes to be stacked, and to be added.

        Their types and shapes are of use, no more.
        """
        found: list[tuple[Flat, Flat]] = []

        def probe() -> None:
            first = tf.constant(0)
            found.append(self._turn(first, theta, state, _read(xs, first))[1:])

        tf.function(probe, autograph=False).get_concrete_function()
        return found[0]

    def _forward(
        self, theta: Flat, state: Flat, xs: Flat, shapes: tuple[Flat, Flat]
    ) -> tuple[tuple[Flat, Flat, Flat], Flat]:
        """Returns the outputs, and the state before every turn if there is to be a gradient."""
        kept = self._buffers(state if self._ctx.is_training else [])
        stacks = self._buffers(shapes[0])
        sums = [tf.zeros(v.shape, v.dtype) for v in shapes[1]]

        def body(i: Any, state: Flat, kept: Flat, stacks: Flat, sums: Flat) -> Any:
            if kept:
                kept = _write(kept, i, state)
            state, ys, more = self._turn(i, theta, state, _read(xs, i))
            return i + 1, state, kept, _write(stacks, i, ys), _add(sums, more)

        _, state, kept, stacks, sums = tf.while_loop(
            lambda i, *_: i < self._turns,
            body,
            (tf.constant(0), state, kept, stacks, sums),
            maximum_iterations=self._turns,
            name=_loop_name(),
        )
        return (state, stacks, sums), kept

    def _backward(
        self,
        theta: Flat,
        xs: Flat,
        kept: Flat,
        gradients: tuple[list[tf.Tensor | None], ...],
        outputs: tuple[Flat, Flat, Flat],
    ) -> list[tf.Tensor | None]:
        dafter, dstacked, dsummed = (
            [tf.zeros_like(y) if d is None else d for d, y in zip(ds, ys, strict=True) if _has(y)]
            for ds, ys in zip(gradients, outputs, strict=True)
        )

        def turn_gradients(i: tf.Tensor, dstate: Flat) -> tuple[Flat, Flat, Flat]:
            inputs = theta, _read(kept, i), _read(xs, i)
            watched = [_learning(flat) for flat in inputs]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(watched)
                outputs = _joined(self._turn(i, *inputs))
            dtheta, dbefore, dx = tape.gradient(
                _learning(outputs),
                watched,
                output_gradients=[*own(dstate), *_read(dstacked, i), *dsummed],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return self._pinned(dtheta, theta), dbefore, dx

        def body(i: Any, dtheta: Flat, dstate: Flat, dxs: Flat) -> Any:
            more, dstate, dx = turn_gradients(i, dstate)
            return i - 1, _add(dtheta, more), dstate, _write(dxs, i, dx)

        zeros = [[tf.zeros_like(t) for t in _learning(flat)] for flat in (theta, xs)]
        _, dtheta, dstate, dxs = tf.while_loop(
            lambda i, *_: i >= 0,
            body,
            (tf.constant(self._turns - 1), zeros[0], dafter, zeros[1]),
            maximum_iterations=self._turns,
            name=_loop_name(),
        )
        found = iter([*dtheta, *dstate, *dxs])
        return [next(found) if _has(t) else None for t in [*theta, *kept, *xs]]

    def _pinned(self, gradients: Flat, theta: Flat) -> Flat:
        """Gradients of weights, laid out as the weights are."""
        axes = [a for t, a in zip(theta, self._theta_axes, strict=True) if _has(t)]
        return [
            d if a is None else self._ctx.reshard(tf.convert_to_tensor(d), a)
            for d, a in zip(gradients, axes, strict=True)
        ]

    def _buffers(self, values: Flat) -> Flat:
        return [tf.zeros([self._turns, *v.shape], v.dtype) for v in values]


def _loop_name() -> str:
    """A name that no loop of the process has: DTensor makes those of functions of it."""
    return f"loop_{next(_numbers)}"


def own(given: Iterable[tf.Tensor]) -> Flat:
    """Returns tensors that a loop is given as such that its body made.

    Of others, DTensor cannot compile two uses: an IdentityN, which every gradient of its own brings
    along, of one that the loop changes beside one that it does not ("operand does not dominate this
    use"), and the start of a loop in the loop ("block argument must be enclosed by a function").
    """
    return [tf.identity(tensor) for tensor in given]


def _read(buffers: Flat, index: tf.Tensor) -> Flat:
    return [tf.gather(buffer, index) for buffer in buffers]


def _write(buffers: Flat, index: tf.Tensor, values: Flat) -> Flat:
    place = tf.reshape(index, [1, 1])
    return [
        tf.tensor_scatter_nd_update(buffer, place, tf.expand_dims(value, 0))
        for buffer, value in zip(buffers, values, strict=True)
    ]


def _add(totals: Flat, more: Flat) -> Flat:
    return [a + b for a, b in zip(totals, more, strict=True)]


def _has(x: tf.Tensor) -> bool:
    """Whether x has a gradient."""
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
