"""Reproduces the defects of DTensor that `workarounds/` avoids, and tests the workarounds.

Started by tests in a process of its own: one fork for each job, {"defect": name, "avoided": bool}.
A reproduction returns whether the values are right; a defect may also be an error or a crash.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mesh"))

from jobs import run_all
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from tekso.framework.execution import ExecutionError, devices
from tekso.framework.execution.mesh import control_flow, mesh_devices, step_errors, vocab
from tekso.framework.execution.mesh import forms as mesh_forms
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout, MeshShape, Rules
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.pipeline.graph_cut import LOOPS, GraphCut, Subgraph
from tekso.framework.execution.pipeline.mesh_backend import MeshBackend
from tekso.framework.execution.workarounds import compiler, forms, tensors
from tekso.framework.execution.workarounds.retracing import retraced
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported
from tekso.framework.primitives.fusion import no_fusion
from tekso.framework.weight_update import select

WHOLE_2D, ROWS, COLUMNS = (None, None), ("m", None), (None, "m")
MESH = MeshShape.parse("m:2")

Place = Placement
Compiled = Callable[..., Any]


def _values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _equal(place: Place, y: tf.Tensor, expected: np.ndarray) -> bool:
    return bool(np.allclose(place.to_host(y), expected, rtol=1e-5, atol=1e-5))


def _run(function: Compiled, *inputs: tf.Tensor) -> tf.Tensor:
    return tf.function(function, autograph=False)(*inputs)


def scalar_where(place: Place, avoided: bool) -> bool:
    """tf.where with a scalar condition and a sharded tensor crashes the process."""
    x = _values(4, 6)
    where = select if avoided else tf.where
    y = _run(lambda x: where(tf.reduce_sum(x) > 1e6, x, -x), place.put(x, ROWS))
    return _equal(place, y, -x)


def new_axis(place: Place, avoided: bool) -> bool:
    """x[:, None] of a sharded tensor has no layout."""
    x = _values(4, 6)
    expand = (lambda x: tf.expand_dims(x, 1)) if avoided else (lambda x: x[:, None])
    return _equal(place, _run(lambda x: expand(x) * 2.0, place.put(x, ROWS)), 2 * x[:, None])


def negative_step(place: Place, avoided: bool) -> bool:
    """A slice with a negative step along a sharded dim reverses each shard alone."""
    x = _values(4, 6)

    def reverse(x: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, range(5, -1, -1), axis=1) if avoided else x[:, ::-1]

    return _equal(place, _run(reverse, place.put(x, COLUMNS)), x[:, ::-1])


def inner_relayout(place: Place, avoided: bool) -> bool:
    """The default resharding between two inner dims of a tensor of rank 4 gives wrong values."""
    x = _values(2, 4, 4, 4)
    placed = place.put(x, (None, "m", None, None))
    return _equal(place, place.reshard(placed, (None, None, "m", None)), x)


def changing_integer(place: Place, avoided: bool) -> bool:
    """A small integer is compiled as a constant, so a function is compiled again for another."""

    @tf.function(autograph=False)
    def scale(x: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return x * tf.cast(number[0], tf.float32)

    x, compiled = _values(4), []
    for value in (2, 3):
        number = np.int32(value)
        number = tensors.copies(number) if avoided else number[np.newaxis]
        is_right = _equal(place, scale(place.put(x, ("m",)), place.put(number)), x * value)
        compiled.append(context.context().list_function_names())
    return is_right and compiled[0] == compiled[1]


def concatenated_shards(place: Place, avoided: bool) -> bool:
    """Tensors cannot be concatenated along a dim that is sharded afterwards."""
    x, y = _values(4, 6), _values(4, 2)

    def join(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        joined = tf.concat([x, y], 1)
        if avoided:
            joined = tensors.separated(place.reshard(joined, WHOLE_2D))
        return place.reshard(joined, COLUMNS)

    return _equal(place, _run(join, place.put(x), place.put(y)), np.concatenate([x, y], 1))


def row_of_stacked_weights(place: Place, avoided: bool) -> bool:
    """x[-1], of which an einsum contracts two dims, one of them sharded."""
    x, w = _values(8, 4, 2), _values(3, 4, 2, 6)

    def contract(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        row = forms.take_row(cast(Any, None), w, 2) if avoided else w[-1]  # needs no context
        return tf.einsum("abc,bcd->ad", x, row)

    layouts = (None, "m", None), (None, "m", None, None)
    y = _run(contract, place.put(x, layouts[0]), place.put(w, layouts[1]))
    return _equal(place, y, np.einsum("abc,bcd->ad", x, w[-1]))


def sums_in_16_bits(place: Place, avoided: bool) -> bool:
    """DTensor sums the shards of a bfloat16 product in bfloat16, in which 257 is 256."""
    rows = np.zeros([1024, 1], np.float32)
    rows[:257] = rows[-1] = 1  # the first device sums 257, and the second 1
    x, w, b = (tf.cast(one, tf.bfloat16) for one in (rows, np.ones([1, 2]), np.zeros(2)))
    context = cast(Any, types.SimpleNamespace(layout_of=lambda _: None))

    def gradients(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([w, b])
            if avoided:
                y = mesh_forms.project(context, x, w, b)
            else:
                y = tf.einsum("ab,bc->ac", x, w) + b
            total = tf.reduce_sum(tf.cast(y * x, tf.float32))
        dw, db = tape.gradient(total, [w, b])
        return tf.cast(tf.stack([dw[0], db]), tf.float32)

    y = _run(gradients, place.put(x, ROWS), place.put(w), place.put(b))
    return _equal(place, y, np.full([2, 2], 258, np.float32))


def contraction_of_two_dims(place: Place, avoided: bool) -> bool:
    """An einsum over two dims, of which an axis shards one in x and the other in w.

    x is constrained, or a weight like w.
    """
    x, w = _values(8, 4, 2), _values(4, 2, 6)
    variable = tensors.new_variable(place.put(w, ("m", None, None)))

    def contracted(axes: Layout, *, is_weight: bool) -> bool:
        weight = tensors.new_variable(place.put(x, axes))

        def contract(x: tf.Tensor) -> tf.Tensor:
            given = weight if is_weight else tf.identity(place.reshard(x, axes))
            y = tf.einsum("abc,bcd->ad", given, variable)
            if avoided:
                refuse_unsupported(tf.compat.v1.get_default_graph())
            return y

        return _equal(place, _run(contract, place.put(x)), np.einsum("abc,bcd->ad", x, w))

    wrong, right = (None, None, "m"), (None, "m", None)
    if not avoided:
        return contracted(wrong, is_weight=False) or contracted(wrong, is_weight=True)
    for is_weight in (False, True):
        with contextlib.suppress(ExecutionError):
            contracted(wrong, is_weight=is_weight)
            return False
    return contracted(right, is_weight=False) and contracted(right, is_weight=True)


def contraction_of_activations(place: Place, avoided: bool) -> bool:
    """The same if no operand was constrained: the result is doubled. Also in a loop or a sum."""
    x, w = _values(8, 4, 2), _values(4, 2, 6)
    once = np.einsum("abc,bcd->ad", np.tanh(x), np.tanh(w))

    def product(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.einsum("abc,bcd->ad", tf.tanh(x), tf.tanh(w))

    def in_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, _: tf.Tensor) -> Any:
            return i + 1, product(*tensors.loop_inputs([x, w]))

        return tf.while_loop(lambda i, _: i < 1, body, (0, tf.zeros([8, 6])))[1]

    def in_sum(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return product(x, w) + product(-x, -w)

    def in_sum_of_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, y + product(*tensors.loop_inputs([x, w]))

        return tf.while_loop(lambda i, _: i < 2, body, (0, tf.zeros([8, 6])))[1]

    def is_right(function: Compiled, *, axes: Layout) -> bool:
        run = step_errors.compiled(function, "a mesh") if avoided else tf.function(function)
        y = run(place.put(x, axes), place.put(w, ("m", None, None)))
        return _equal(place, y, once * (2 if function in (in_sum, in_sum_of_loop) else 1))

    wrong, right = (None, None, "m"), (None, "m", None)
    for function in (product, in_loop, in_sum, in_sum_of_loop):
        if not avoided and is_right(function, axes=wrong):
            return True
        if avoided:
            with contextlib.suppress(ExecutionError):
                is_right(function, axes=wrong)
                return False
            if function is not in_loop and not is_right(function, axes=right):
                return False
    return avoided


def sums_over_dims_of_one_operand(place: Place, avoided: bool) -> bool:
    """An einsum over a dim of x and another one of y, which one axis shards."""
    x, y = _values(8, 4), _values(3, 4)

    def product(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if avoided:
            return tf.einsum("a,c->ac", tf.reduce_sum(x, 1), tf.reduce_sum(y, 1))
        return tf.einsum("ab,cd->ac", x, y)

    z = _run(product, place.put(x, (None, "m")), place.put(y, (None, "m")))
    return _equal(place, z, np.einsum("ab,cd->ac", x, y))


def softmax_sums_in_16_bits(place: Place, avoided: bool) -> bool:
    """The same for the table and the bias of a softmax; 128.5 is 128 in bfloat16."""
    rows = np.zeros([1024, 1], np.float32)
    rows[:257] = rows[-1] = 1
    x, table, bias = (tf.cast(v, tf.bfloat16) for v in (rows, np.zeros([2, 1]), np.zeros(2)))
    context = types.SimpleNamespace(
        layout_of=lambda _: None, axes=lambda *_: ("m",), reshard=place.reshard, fuse=no_fusion
    )
    labels = np.zeros([1024], np.int32)

    def gradients(x: tf.Tensor, labels: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            if avoided:
                nats = vocab.cross_entropy(
                    cast(Any, context), x, weights[0], labels, bias=weights[1]
                )
            else:
                log_p = tf.nn.log_softmax(tf.einsum("ad,vd->av", x, weights[0]) + weights[1])
                nats = -tf.reduce_sum(tf.one_hot(labels, 2, dtype=x.dtype) * log_p, 1)
            total = tf.reduce_sum(tf.cast(nats * tf.cast(x[:, 0], nats.dtype), tf.float32))
        dtable, dbias = tape.gradient(total, weights)
        return tf.cast(tf.stack([dtable[:, 0], dbias]), tf.float32)

    weights = place.put(table), place.put(bias)
    y = _run(gradients, place.put(x, ROWS), place.put(labels, ("m",)), *weights)
    return _equal(place, y, np.array([[-129, 129]] * 2, np.float32))


def resharded_gather(place: Place, avoided: bool) -> bool:
    """A gather whose result is sharded along a dim that is not sharded in its input."""
    x = _values(4, 6)

    def reverse(x: tf.Tensor) -> tf.Tensor:
        y = tf.gather(x, tf.range(5, -1, -1), axis=1)
        if avoided:
            y = tensors.separated(place.reshard(y, WHOLE_2D))
        return place.reshard(y, ROWS)

    return _equal(place, _run(reverse, place.put(x)), x[:, ::-1])


def row_of_a_buffer(place: Place, avoided: bool) -> bool:
    """A row of a buffer that is not sharded, with a value that is, in a loop."""
    buffer, x = _values(3, 4, 6), _values(4, 6)

    def add(buffer: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            row = control_flow.read([buffer], i)[0] if avoided else tf.gather(buffer, i)
            return i + 1, tf.tanh(row + x) * x + y

        return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros_like(x)))[1]

    y = _run(add, place.put(buffer), place.put(x, ROWS))
    return _equal(place, y, (np.tanh(buffer + x) * x).sum(0))


def sorted_values(place: Place, avoided: bool) -> bool:
    """The gradient of the values of top_k scatters by indices of the whole tensor into a shard."""
    x = _values(4, 6)

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = place.reshard(3 * x, ROWS)
            values, indices = tf.math.top_k(y, 2)
            if avoided:
                values = tf.gather(y, indices, batch_dims=1)
            total = tf.reduce_sum(tf.reduce_sum(values, 1, keepdims=True) * y)
        return tape.gradient(total, x)

    is_kept = x >= np.sort(x, 1)[:, -2:-1]
    sums = (x * is_kept).sum(1, keepdims=True), x.sum(1, keepdims=True)
    return _equal(place, _run(gradient, place.put(x, ROWS)), 9 * (sums[0] + sums[1] * is_kept))


def loop_gradient(place: Place, avoided: bool) -> bool:
    """The gradient of a while loop has no layout: hence the loops of `control_flow`."""
    x = _values(4, 6)

    def iterate(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            if avoided:
                y = x * x * x
            else:
                y = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, x * y), (0, x))[1]
        return tape.gradient(y, x)

    return _equal(place, _run(iterate, place.put(x, ROWS)), 3 * x**2)


def loop_input_in_custom_gradient(place: Place, avoided: bool) -> bool:
    """A custom gradient in a loop, of an input that changes and one that does not."""
    x = _values(4)

    @tf.custom_gradient
    def product(w: tf.Tensor, x: tf.Tensor) -> Any:
        return w * x, lambda dy: (dy * x, dy * w)

    def power(w: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, x: tf.Tensor) -> Any:
            inputs = tensors.loop_inputs([w, x]) if avoided else [w, x]
            return i + 1, product(*inputs)

        return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]

    return _equal(place, _run(power, place.put(x, ("m",)), place.put(x, ("m",))), x**4)


def loop_input_in_loop(place: Place, avoided: bool) -> bool:
    """An input of a loop as the start value of an inner loop."""
    x = _values(4)

    def double(i: tf.Tensor, x: tf.Tensor) -> Any:
        (start,) = tensors.loop_inputs([x]) if avoided else [x]
        return i + 1, tf.while_loop(lambda j, _: j < 2, lambda j, x: (j + 1, 2 * x), (0, start))[1]

    def run(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 3, double, (0, x))[1]

    return _equal(place, _run(run, place.put(x, ("m",))), 64 * x)


def loop_name_in_use(place: Place, avoided: bool) -> bool:
    """The functions of a loop have names that are in use, as if its op had an old address."""
    x = place.put(_values(4), ("m",))

    def count_to(limit: float) -> Compiled:
        def run(x: tf.Tensor) -> tf.Tensor:
            zeros = tf.zeros_like(x)
            return tf.while_loop(lambda y: tf.reduce_sum(y) < limit, lambda y: [y + 1], [zeros])[0]

        return retraced(run) if avoided else tf.function(run, autograph=False)

    first, second = count_to(5.0), count_to(9.0)
    is_right = _equal(place, first(x), np.full(4, 2.0))
    library = context.context()
    for part in ("cond", "body"):  # the names that the loop of `second` will have
        used = library.get_function_def(f"while_{part}")
        used.signature.name = f"while1_{part}"
        library.add_function_def(used)
    is_right &= _equal(place, second(x), np.full(4, 3.0))
    return is_right and _equal(place, first(x), np.full(4, 2.0))


def loop_name_in_use_of_cut(place: Place, avoided: bool) -> bool:
    """The same for a function that is cut from the graph of a stage of a pipeline."""
    x = place.put(_values(4), ("m",))

    def graph(x: tf.Tensor, late: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        zeros = 0.0 * x
        (y,) = tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: [y + 1], [zeros])
        (z,) = tf.while_loop(lambda z: tf.reduce_sum(z) < 13.0, lambda z: [z + 2], [zeros])
        return y + z, late

    spec = tf.TensorSpec([4], tf.float32)
    concrete = tf.function(graph, autograph=False).get_concrete_function(spec, spec)
    cut = GraphCut(concrete, num_late=1, num_lasting=0)
    first, second = (cut.function(cut.early, concrete.outputs[:1]) for _ in range(2))
    backend = MeshBackend(
        "a stage", MeshLayout(MESH, Rules.parse("mlp:m")), place.mesh, compiles=False
    )

    def is_right(function: Subgraph, *, through_backend: bool = True) -> bool:
        known = {concrete.inputs[0].name: x}
        y = backend.call(function, known) if through_backend else function(known)
        return _equal(place, y[0][0], np.full(4, 7.0))

    right = is_right(first)
    library = context.context()
    for name in _loops(first):  # both loops of `second` will have a name in use
        for part in ("cond", "body"):
            used = library.get_function_def(f"{name}_{part}")
            used.signature.name = f"{name}1_{part}"
            used.attr["old"].b = True  # else it is the same function, which is no error
            library.add_function_def(used)
    right &= is_right(second, through_backend=avoided)
    return right and is_right(first) and is_right(second)


def _loops(function: Subgraph) -> list[str]:
    """Returns the names of the loops of a function; DTensor adds a number if one is in use."""
    ops = function._call.graph.get_operations()
    return [op.name for op in ops if op.type in LOOPS]


def wait_with_lock(place: Place, avoided: bool) -> bool:
    """While one thread waits for a value, no other thread of Python takes a turn."""
    x = place.put(_values(1024, 1024) * 1e-3, ROWS)
    w = place.put(_values(1024, 1024) * 1e-3)

    @tf.function(autograph=False)
    def compute(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        for _ in range(12):
            x = x @ w
        return place.reshard(tf.reduce_sum(x), ())

    place.local(compute(x, w))  # compiles
    turns, is_done = [0], threading.Event()

    def take_turns() -> None:
        while not is_done.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=take_turns)
    other.start()
    y = compute(x, w)
    before = turns[0]
    if avoided:
        tensors.first_copy(y)
    else:
        dtensor.unpack(y)
    taken = turns[0] - before
    is_done.set()
    other.join()
    return taken > 10  # it may take some before the wait begins and after it ends


REPRODUCTIONS = {
    reproduction.__name__: reproduction
    for reproduction in (
        changing_integer,
        concatenated_shards,
        contraction_of_activations,
        contraction_of_two_dims,
        inner_relayout,
        loop_gradient,
        loop_input_in_custom_gradient,
        loop_input_in_loop,
        loop_name_in_use,
        loop_name_in_use_of_cut,
        negative_step,
        new_axis,
        resharded_gather,
        row_of_a_buffer,
        row_of_stacked_weights,
        scalar_where,
        softmax_sums_in_16_bits,
        sorted_values,
        sums_in_16_bits,
        sums_over_dims_of_one_operand,
        wait_with_lock,
    )
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a reproduction on two devices."""
    name, avoided = job["defect"], job["avoided"]
    compiler.cut_messages()
    if name != "inner_relayout" or avoided:
        compiler.choose_passes()
    devices.setup_cpu(logical_devices=2, threads_per_op=1)
    place = Placement(mesh_devices.make_mesh(MESH, "CPU"))
    return {"right": REPRODUCTIONS[name](place, avoided)}


if __name__ == "__main__":
    run_all(run)
