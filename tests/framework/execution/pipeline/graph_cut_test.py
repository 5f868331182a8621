"""Functions that are cut from one graph."""

from __future__ import annotations

import tensorflow as tf

from tekso.framework.execution.pipeline.graph_cut import GraphCut


def test_functions_with_the_same_loop_compute_the_same_when_traced_again() -> None:
    def doubled_until_large(x: tf.Tensor, gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        (y,) = tf.while_loop(lambda y: y < 10.0, lambda y: [2.0 * y], [x], name="loop")
        return y, y * gradient

    scalar = tf.TensorSpec([], tf.float32)
    concrete = tf.function(doubled_until_large, autograph=False).get_concrete_function(
        scalar, scalar
    )
    cut = GraphCut(concrete, num_late=1, num_lasting=0)
    output, late = concrete.outputs
    functions = [cut.function(cut.early, [output]), cut.function([*cut.early, *cut.late], [late])]
    x, gradient = (t.name for t in concrete.inputs)
    values = {x: tf.constant(3.0), gradient: tf.constant(0.5)}
    for _ in range(2):
        assert [float(function(values)[0][0]) for function in functions] == [12.0, 6.0]
        for function in functions:
            function.trace_again()


def test_an_inlined_function_adds_its_ops_to_the_graph_that_calls_it() -> None:
    def both(x: tf.Tensor, gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = tf.square(x)
        return y, 2.0 * x * gradient

    scalar = tf.TensorSpec([], tf.float32)
    concrete = tf.function(both, autograph=False).get_concrete_function(scalar, scalar)
    cut = GraphCut(concrete, num_late=1, num_lasting=0)
    forward = cut.function(cut.early, concrete.outputs[:1], inlined=True)

    def sum_of_squares(count: tf.Tensor) -> tf.Tensor:
        def add(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            (square,), _ = forward({concrete.inputs[0].name: tf.cast(i, tf.float32)})
            return i + 1, total + square

        return tf.while_loop(lambda i, _: i < count, add, [0, 0.0])[1]

    assert float(tf.function(sum_of_squares, autograph=False)(tf.constant(4))) == 14.0


def test_a_function_has_loops_if_its_graph_or_a_function_of_it_has() -> None:
    """Only functions with loops may have to be traced again."""

    @tf.function(autograph=False)
    def doubled(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda y: y < 10.0, lambda y: [2.0 * y], [x])[0]

    scalar = tf.TensorSpec([], tf.float32)
    for called, has_loops in ((doubled, True), (tf.identity, False)):
        concrete = tf.function(
            lambda x, late, called=called: (called(x), late), autograph=False
        ).get_concrete_function(scalar, scalar)
        cut = GraphCut(concrete, num_late=1, num_lasting=0)
        assert cut.function(cut.early, concrete.outputs[:1]).has_loops == has_loops
