"""Defects of DTensor in loops: gradients, inputs, names of functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from reproducing import MESH, ROWS, Compiled, Place, computed, equal, values
from tensorflow.python.eager import context

from tekso.framework.costs.op_kinds import LOOPS
from tekso.framework.execution.mesh import control_flow
from tekso.framework.execution.mesh.layouts import MeshLayout, Rules
from tekso.framework.execution.pipeline.graph_cut import GraphCut, Subgraph
from tekso.framework.execution.pipeline.mesh_backend import MeshBackend
from tekso.framework.execution.workarounds import tensors
from tekso.framework.execution.workarounds.retracing import retraced


def row_of_a_buffer(place: Place, avoided: bool) -> bool:
    """A row of a buffer that is not sharded, with a value that is, in a loop."""
    buffer, x = values(3, 4, 6), values(4, 6)

    def add(buffer: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            row = control_flow.read([buffer], i)[0] if avoided else tf.gather(buffer, i)
            return i + 1, tf.tanh(row + x) * x + y

        return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros_like(x)))[1]

    y = computed(add, place.put(buffer), place.put(x, ROWS))
    return equal(place, y, (np.tanh(buffer + x) * x).sum(0))


def loop_gradient(place: Place, avoided: bool) -> bool:
    """The gradient of a while loop has no layout: hence the loops of `control_flow`."""
    x = values(4, 6)

    def iterate(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            if avoided:
                y = x * x * x
            else:
                y = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, x * y), (0, x))[1]
        return tape.gradient(y, x)

    return equal(place, computed(iterate, place.put(x, ROWS)), 3 * x**2)


def loop_input_in_custom_gradient(place: Place, avoided: bool) -> bool:
    """A custom gradient in a loop, of an input that changes and one that does not."""
    x = values(4)

    @tf.custom_gradient
    def product(w: tf.Tensor, x: tf.Tensor) -> Any:
        return w * x, lambda dy: (dy * x, dy * w)

    def power(w: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, x: tf.Tensor) -> Any:
            inputs = tensors.loop_inputs([w, x]) if avoided else [w, x]
            return i + 1, product(*inputs)

        return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]

    return equal(place, computed(power, place.put(x, ("m",)), place.put(x, ("m",))), x**4)


def loop_input_in_loop(place: Place, avoided: bool) -> bool:
    """An input of a loop as the start value of an inner loop."""
    x = values(4)

    def double(i: tf.Tensor, x: tf.Tensor) -> Any:
        (start,) = tensors.loop_inputs([x]) if avoided else [x]
        return i + 1, tf.while_loop(lambda j, _: j < 2, lambda j, x: (j + 1, 2 * x), (0, start))[1]

    def run(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 3, double, (0, x))[1]

    return equal(place, computed(run, place.put(x, ("m",))), 64 * x)


def loop_name_in_use(place: Place, avoided: bool) -> bool:
    """The functions of a loop have names that are in use, as if its op had an old address."""
    x = place.put(values(4), ("m",))

    def count_to(limit: float) -> Compiled:
        def run(x: tf.Tensor) -> tf.Tensor:
            zeros = tf.zeros_like(x)
            return tf.while_loop(lambda y: tf.reduce_sum(y) < limit, lambda y: [y + 1], [zeros])[0]

        return retraced(run) if avoided else tf.function(run, autograph=False)

    first, second = count_to(5.0), count_to(9.0)
    is_right = equal(place, first(x), np.full(4, 2.0))
    library = context.context()
    for part in ("cond", "body"):  # the names that the loop of `second` will have
        used = library.get_function_def(f"while_{part}")
        used.signature.name = f"while1_{part}"
        library.add_function_def(used)
    is_right &= equal(place, second(x), np.full(4, 3.0))
    return is_right and equal(place, first(x), np.full(4, 2.0))


def loop_name_in_use_of_cut(place: Place, avoided: bool) -> bool:
    """The same for a function that is cut from the graph of a stage of a pipeline."""
    x = place.put(values(4), ("m",))

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
        return equal(place, y[0][0], np.full(4, 7.0))

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


REPRODUCTIONS = (
    loop_gradient,
    loop_input_in_custom_gradient,
    loop_input_in_loop,
    loop_name_in_use,
    loop_name_in_use_of_cut,
    row_of_a_buffer,
)
