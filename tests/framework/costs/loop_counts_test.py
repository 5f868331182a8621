"""Number of iterations of traced loops, against loops of known length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.costs import graph_work

LENGTH, ROWS, SIZE = 7, 2, 3


def loops(function: Callable[..., Any]) -> list[Any]:
    """The loops of a function of [length, rows, size] and [size, size], in order."""
    specs = [tf.TensorSpec([LENGTH, ROWS, SIZE]), tf.TensorSpec([SIZE, SIZE])]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]


def recurrent(length: Callable[[tf.Tensor], Any], step: int = 1) -> Callable[..., Any]:
    """h = tanh((h + x) w) for each x, from 0 to `length(xs)`."""

    def run(xs: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda t, h: t < length(xs),
            lambda t, h: (t + step, tf.tanh((h + xs[t]) @ w)),
            [tf.constant(0), tf.zeros([ROWS, SIZE])],
        )[1]

    return run


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(xs: tf.Tensor, w: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = tf.reduce_sum(function(xs, w))
        return tape.gradient(y, w)

    return run


def size_before(xs: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The same with the length computed outside of the loop, by an op that is not folded."""
    length = tf.cast(tf.raw_ops.Shape(input=xs, out_type=tf.int64)[0], tf.int32)
    return recurrent(lambda xs: length)(xs, w)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (recurrent(lambda xs: 5), 5),
        (recurrent(lambda xs: tf.shape(xs)[0]), LENGTH),
        (recurrent(lambda xs: tf.shape(xs)[0] - 1), LENGTH - 1),
        (recurrent(lambda xs: 6, step=2), 3),
        (recurrent(lambda xs: 0), 0),
        (size_before, LENGTH),
        (lambda xs, w: tf.scan(lambda h, x: tf.tanh((h + x) @ w), xs, xs[0]), LENGTH),
    ],
)
def test_a_loop_and_its_gradient_run_as_often_as_the_counter_says(
    function: Any, expected: int
) -> None:
    assert [graph_work.iterations(one) for one in loops(function)] == [expected]
    if expected:
        assert [graph_work.iterations(one) for one in loops(gradient(function))] == [expected] * 2


def test_the_length_is_unknown_if_values_decide() -> None:
    def until_large(xs: tf.Tensor, w: tf.Tensor) -> Any:
        return tf.while_loop(lambda h: tf.reduce_sum(h) < 9.0, lambda h: [h @ w], [xs[0]])

    (loop,) = loops(until_large)
    assert graph_work.iterations(loop) is None
    assert graph_work.uncounted_loops(loop.graph) == [loop]
    (longest,) = loops(
        lambda xs, w: tf.while_loop(
            lambda h: tf.reduce_sum(h) < 9.0, lambda h: [h @ w], [xs[0]], maximum_iterations=4
        )
    )
    assert graph_work.iterations(longest) == 4
    assert graph_work.uncounted_loops(longest.graph) == []


def test_work_of_a_loop_counts_all_iterations() -> None:
    function = recurrent(lambda xs: tf.shape(xs)[0])
    specs = [tf.TensorSpec([LENGTH, ROWS, SIZE]), tf.TensorSpec([SIZE, SIZE])]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    products = LENGTH * 2 * ROWS * SIZE * SIZE
    others = LENGTH * 2 * ROWS * SIZE  # a sum, a tanh
    assert products + others <= graph_work.count(graph).flops <= products + 2 * others
