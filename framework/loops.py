"""`ops.scan` as a while loop and `ops.rematerialize` as recomputation, for a single device.

Both trace a body, which may collect losses, metrics and statistics. Collected values leave the body
as ordinary outputs. Losses and metrics are summed over iterations. Statistics are stacked over
iterations, like the weights of the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import closures, outer_tensors
from tekso.framework.context import StepContext, isolated
from tekso.framework.late_gradients import LateGradients, without_late_gradients
from tekso.framework.nests import as_tensors, filled, has_gradient, is_plain, stacked, tensors
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import XlaFusion
from tekso.framework.primitives.precision import widen
from tekso.framework.source_lines import place_of
from tekso.framework.theta import Theta
from tekso.framework.while_loops import while_loop


def scan(
    ctx: StepContext,
    body: Callable[..., tuple[Any, Any]],
    theta: Theta,
    state: Any,
    xs: Any,
    *,
    first: int = 0,
) -> tuple[Any, Any]:
    """See `ops.scan`."""
    state, xs = as_tensors((state, xs))
    num_iterations = iterations_of(xs)
    late = LateGradients(ctx, theta)
    # The loop sums the gradients of theta over iterations in the dtype of what its body captures.
    wide = tf.nest.map_structure(lambda t: widen(t) if _is_16_bits(t) else t, theta)

    def run_iteration(
        i: Any, state: Any, x: Any, body: Callable[..., Any] = body
    ) -> tuple[Any, Any, Any]:
        inner = late.deferring(isolated(ctx).fold(i + first))
        own = tf.nest.map_structure(
            lambda w, t: tf.cast(w, t.dtype) if _is_16_bits(t) else w, wide, theta
        )
        after, y = as_tensors(body(own, state, x, inner))
        tf.nest.map_structure(check_same, state, after)
        sums = inner.collected.sums
        statistics = {"statistic": sums["statistic"]}
        summed = {k: v for k, v in sums.items() if k != "statistic"}
        return after, (y, statistics, late.inputs()), summed

    if tf.executing_eagerly():
        state, ys, summed = _python_loop(run_iteration, num_iterations, state, xs)
    else:
        run_again = functools.partial(run_iteration, body=closures.frozen(body))
        runs = run_iteration, run_again
        state, ys, summed = _graph_loop(runs, num_iterations, state, xs, late)
    y, statistics, projected = ys
    late.finish(projected)
    ctx.collected.merge(summed)
    ctx.collected.merge(statistics)
    return state, y


def compiles_loops(ctx: StepContext, xs: tf.Tensor) -> bool:
    """Returns whether a loop over xs [iterations, …] may be one program of XLA.

    It may if the execution compiles clusters, and has no form of `scan` or of the products within.
    Decoding calls loops of many lengths, each of which would be compiled.
    """
    return (
        isinstance(ctx.fuse, XlaFusion)
        and not {"scan", "project"} & ctx.forms.keys()
        and ctx.mode != "decode"
        and xs.shape.is_fully_defined()
        and xs.dtype in (tf.float32, tf.float64)
        and not tf.executing_eagerly()
    )


def _is_16_bits(x: Any) -> bool:
    return bool(tf.is_tensor(x) and x.dtype.is_floating and x.dtype.size == 2)


def iterations_of(xs: Any) -> int:
    """Returns the number of iterations: the leading dim of all tensors in `xs`.

    Raises:
      ValueError: there are no tensors, or their leading dims differ or are unknown.
    """
    flat_xs = tf.nest.flatten(xs)
    if not flat_xs:
        raise ValueError("scan: xs has no tensors, so the number of iterations is unknown")
    shapes = [tf.TensorShape(np.shape(x) if is_plain(x) else x.shape) for x in flat_xs]
    sizes = [shape[0] if shape.rank else "scalar" for shape in shapes]
    num_iterations = sizes[0]
    if (
        not isinstance(num_iterations, int)
        or num_iterations < 1
        or any(n != num_iterations for n in sizes)
    ):
        raise ValueError(
            "scan: all tensors in xs must have the same known leading dim of at least 1 (the "
            f"number of iterations), given: {sizes}"
        )
    return num_iterations


def _python_loop(
    run_iteration: Callable[..., Any], num_iterations: int, state: Any, xs: Any
) -> tuple[Any, Any, Any]:
    ys, summed = [], None
    # Rows of an unstacked tensor take one op; the gradient of each x[i] would be as large as x.
    rows = [tf.unstack(x, num_iterations) for x in tf.nest.flatten(xs)]
    for i in range(num_iterations):
        x = tf.nest.pack_sequence_as(xs, [one[i] for one in rows])
        state, y, sums = run_iteration(i, state, x)
        ys.append(y)
        summed = sums if summed is None else tf.nest.map_structure(tf.add, summed, sums)
    return state, stacked(ys), summed


class _MoreTensorsError(Exception):
    """An iteration returned more than its state, for which its loop has no places.

    Attributes:
      stacked: nest of the tensors to be stacked over iterations.
      summed: nest of the tensors to be summed over iterations.
    """

    def __init__(self, stacked: Any, summed: Any) -> None:
        super().__init__()
        self.stacked, self.summed = stacked, summed


def _graph_loop(
    runs: tuple[Callable[..., Any], Callable[..., Any]],
    num_iterations: int,
    state: Any,
    xs: Any,
    late: LateGradients,
) -> tuple[Any, Any, Any]:
    """Returns the last state, the stacked tensors and the summed tensors.

    A loop is made with a place for each tensor that its body returns, before the body is traced. So
    the body is first assumed to return only its state, as most layers of a stack do. If it returns
    more, it is traced a second time, by the second of `runs`.
    """
    inputs = tf.nest.map_structure(_unstacked, xs)

    def loop(run: Callable[..., Any], stacked: Any, summed: Any) -> tuple[Any, Any, Any]:
        products = [_unstacked(x) for x in late.zeros(num_iterations)]
        # No TensorArray for None: XLA cannot differentiate an array that is never written.
        arrays = [
            tf.TensorArray(y.dtype, num_iterations, element_shape=y.shape) for y in tensors(stacked)
        ]
        sums = [tf.zeros(s.shape, s.dtype) for s in tensors(summed)]
        returned: dict[str, Any] = {}

        def loop_body(i: Any, state: Any, arrays: Any, sums: Any) -> Any:
            x = tf.nest.map_structure(lambda array: array.read(i), inputs)
            late.start([array.read(i) for array in products])
            new_state, y, more = run(i, state, x)
            late.stop()
            places, found = len(arrays) + len(sums), len(tensors((y, more)))
            if found and not places:
                raise _MoreTensorsError(y, more)
            if found != places:
                raise ValueError(
                    f"scan: the body returned or collected {places} tensors besides its state when "
                    f"it was traced first, and {found} when it was traced again; it must do the "
                    "same each time"
                )
            returned["stacked"], returned["summed"] = y, more
            arrays = [a.write(i, value) for a, value in zip(arrays, tensors(y), strict=True)]
            return i + 1, new_state, arrays, tf.nest.map_structure(tf.add, sums, tensors(more))

        _, last, arrays, sums = while_loop(
            lambda i, *_: i < num_iterations,
            loop_body,
            (tf.constant(0), state, arrays, sums),
            maximum_iterations=num_iterations,
        )
        ys = filled(returned["stacked"], [array.stack() for array in arrays])
        return last, ys, filled(returned["summed"], sums)

    try:
        return loop(runs[0], None, None)
    except _MoreTensorsError as error:
        more = error.stacked, error.summed
    return loop(runs[1], *more)


def _unstacked(x: tf.Tensor) -> tf.TensorArray:
    return tf.TensorArray(x.dtype, x.shape[0], element_shape=x.shape[1:]).unstack(x)


def check_same(before: Any, after: Any) -> None:
    """Raises a ValueError if an iteration changed the dtype or shape of a state tensor."""
    if before.dtype != after.dtype or not before.shape.is_compatible_with(after.shape):
        raise ValueError(
            f"scan: the body changed a state tensor from {before.dtype.name} {before.shape} to "
            f"{after.dtype.name} {after.shape}; dtype and shape must stay the same"
        )


def rematerialize(
    ctx: StepContext, function: Callable[..., Any], theta: Theta, *inputs: Any
) -> Any:
    """See `ops.rematerialize`; eagerly, nothing is recomputed."""
    if tf.executing_eagerly():
        inner = isolated(ctx)
        output = function(theta, *as_tensors(inputs), inner)
        ctx.collected.merge(inner.collected.sums)
        return output
    everything = (theta, inputs)
    structure: dict[str, Any] = {}
    kept = closures.frozen(function)  # for the backward pass

    def run(
        function: Callable[..., Any], args: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], outer_tensors.Reads]:
        weights, unpacked = filled(everything, args)
        inner = without_late_gradients(isolated(ctx))
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        output = function(weights, *unpacked, inner)
        structure["all"] = (output, inner.collected.sums)
        found = [tf.identity(t) for t in tensors(structure["all"])]  # one may only be read
        return found, outer_tensors.Reads.of(graph.get_operations()[before:], args)

    def recompute(args: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        outputs, later = run(closures.frozen(kept), args)
        reads.refuse_other(later, f"ops.rematerialize: the function{place_of(function)}")
        return outputs

    given = tensors(everything)
    # The function may also read an argument from outside: tell both apart.
    computed, reads = run(function, [tf.identity(t) for t in given])
    outer = outer_tensors.learned(reads.outer)  # they get gradients too
    outputs = _recomputed(recompute, computed, given, outer)
    output, sums = filled(structure["all"], outputs)
    ctx.collected.merge(sums)
    return output


def _recomputed(
    run: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    computed: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor],
    outer: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the outputs of a function, with gradients that compute it again.

    Args:
      run: the function.
      computed: its outputs.
      given: its arguments.
      outer: other tensors that it reads and that have gradients.
    """

    @custom_gradient
    def recomputed(*everything: tf.Tensor) -> Any:
        args = [tf.identity(a) for a in everything[: len(given)]]

        def grad(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
            # The control dependency delays the recomputation until the gradients are computed.
            # Otherwise TensorFlow would merge it with the forward pass and save all activations.
            with tf.control_dependencies([g for g in gradients if g is not None]):
                again = [tf.identity(a) for a in args]
            floats = [i for i, a in enumerate(again) if has_gradient(a)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                watched = [*(again[i] for i in floats), *outer]
                tape.watch(watched[: len(floats)])
                outer_tensors.watch(tape, outer)
                outputs = run(again)
            pairs = [
                (o, g)
                for o, g in zip(outputs, gradients, strict=True)
                if g is not None and has_gradient(o)
            ]
            results: list[tf.Tensor | None] = [None] * len(again)
            found = tape.gradient(
                [o for o, _ in pairs],
                watched,
                output_gradients=[g for _, g in pairs],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            for i, g in zip(floats, found, strict=False):
                results[i] = g
            return [*results, *found[len(floats) :]]

        return list(computed), grad

    outputs: list[tf.Tensor] = tf.nest.flatten(
        recomputed(*given, *map(outer_tensors.inside, outer))
    )
    return outputs
