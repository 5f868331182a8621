"""Clusters that XLA compiles: their loops, the time and the memory that these take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from priced_graphs import SPEED, graph

from tekso.framework.costs import graph_memory, graph_time, graph_work
from tekso.framework.costs.graph_clusters import CompiledCluster


def test_a_cluster_reads_and_writes_only_its_inputs_and_outputs() -> None:
    compiled = tf.function(lambda x: (x * 2.0 + 1.0) * x, jit_compile=True, autograph=False)
    found = graph_time.seconds(graph(lambda x: compiled(x), [1000]), SPEED)
    assert found == pytest.approx(2.0 + 8000 / 1e8)


def test_a_cluster_takes_longer_with_each_input_and_output() -> None:
    compiled = tf.function(lambda *x: (x[0] + x[1], x[1] * x[2]), jit_compile=True, autograph=False)
    made = graph(lambda *x: compiled(*x), [10], [10], [10])
    found = graph_time.seconds(made, dataclasses.replace(SPEED, argument_s=0.5))
    assert found - graph_time.seconds(made, SPEED) == pytest.approx((3 + 2) * 0.5)


def loops(function: Any, *shapes: list[int]) -> CompiledCluster:
    return CompiledCluster(graph(function, *shapes))


def _softmax_gradient(d: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    return p * (d - tf.reduce_sum(d * p, -1, keepdims=True))


def test_a_loop_of_a_cluster_ends_at_what_is_summed_and_at_its_sum() -> None:
    """The gradient of a softmax: p * (d - sum(d * p))."""
    found = loops(_softmax_gradient, [20, 50], [20, 50])
    product, total, result = found.loops
    assert [loop.op.type for loop in found.loops] == ["Mul", "Sum", "Mul"]
    assert product.move.bytes == 3 * 4000 and (product.elements, product.sums) == (1000, 0)
    assert total.move.bytes == 4000 + 80 and (total.elements, total.sums) == (0, 1000)
    assert result.move.bytes == 3 * 4000 + 80 and result.elements == 2000  # both are one loop


def test_sums_of_columns_have_their_own_speed() -> None:
    """The gradient of a bias, and the sums of rows."""
    for axes, is_of_columns in (
        ([0], True),
        ([0, 1], True),
        ([-3], True),
        ([-1], False),
        ([0, 2], False),
    ):
        (loop,) = loops(lambda x, axes=axes: tf.reduce_sum(x, axes), [5, 10, 20]).loops
        assert (loop.sums, loop.column_sums) == ((0, 1000) if is_of_columns else (1000, 0))
    compiled = tf.function(lambda x: tf.reduce_sum(x, 0), jit_compile=True, autograph=False)
    found = graph_time.seconds(graph(lambda x: compiled(x), [10, 20]), SPEED)
    assert found == pytest.approx(2.0 + 200 / 1e5)


def test_a_function_that_several_loops_need_is_computed_once() -> None:
    """A softmax: the exponentials are written for their sum and for the quotient."""

    def softmax(x: tf.Tensor) -> tf.Tensor:
        e = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
        return e / tf.reduce_sum(e, -1, keepdims=True)

    found = loops(softmax, [20, 50])
    assert [loop.op.type for loop in found.loops] == ["Max", "Exp", "Sum", "RealDiv"]
    assert [loop.functions for loop in found.loops] == [{}, {"Exp": 1000}, {}, {}]
    assert found.peak_bytes() == 8000 + 80  # the exponentials, the result and a sum
    cheap = loops(lambda x: (x * 2.0 + 1.0, x * 2.0 + 3.0), [20, 50])
    assert len(cheap.loops) == 2


def test_a_broadcast_is_read_as_what_it_repeats_and_written_if_it_is_an_output() -> None:
    """The gradient of a sum repeats a number; here it is an output, and part of a product."""
    (only,) = loops(lambda x: tf.broadcast_to(x, [20, 50]), [20, 1]).loops
    assert (only.op.type, only.move.bytes) == ("BroadcastTo", 80 + 4000)
    product = loops(lambda x, y: y * tf.broadcast_to(tf.exp(x), [20, 50]), [20, 1], [20, 50])
    exp, result = product.loops  # of 20 elements, not of 1000
    assert (exp.functions, exp.move.bytes) == ({"Exp": 20}, 80 + 80)
    assert (result.elements, result.move.bytes) == (1000, 80 + 4000 + 4000)
    (zeros,) = loops(tf.zeros_like, [20, 50]).loops
    assert zeros.move.bytes == 4000 and not zeros.move.reads
    compiled = tf.function(lambda x: tf.broadcast_to(x, [20, 50]), jit_compile=True)
    assert graph_memory.peak_bytes(graph(lambda x: tf.abs(compiled(x)), [20, 1])) == 4000


def _of_time(length: int, units: int) -> CompiledCluster:
    """A cluster whose loop over time reads a row, multiplies by a matrix and writes a row."""

    def run(rows: tf.Tensor, w: tf.Tensor) -> Any:
        def body(t: tf.Tensor, stack: tf.Tensor) -> Any:
            y = tf.matmul(rows[t], w)
            return t + 1, tf.tensor_scatter_nd_update(stack, [[t]], [y])

        start = (tf.constant(0), tf.zeros([length, 2, units]))
        return tf.while_loop(lambda t, _: t < length, body, start, maximum_iterations=length)[1]

    return loops(run, [length, 2, units], [units, units])


def test_an_iteration_of_a_compiled_loop_reads_and_writes_a_row() -> None:
    (loop,) = [one for one in _of_time(50, 20).loops if one.op.type == "StatelessWhile"]
    (body,) = graph_work.inside(loop.op)[1]
    found = {one.op.type: one.move.bytes for one in CompiledCluster(body).loops}
    row = 4 * 2 * 20
    assert found["MatMul"] == row + 4 * 20 * 20 + row  # the row is copied for it
    assert found["TensorScatterUpdate"] == 2 * row + 4  # and an index
    assert graph_work.count(body).flops < 2 * 2 * 20 * 20 + 3 * 2 * 20  # not the 50 rows


def test_each_iteration_of_a_compiled_loop_starts_its_own_loops() -> None:
    def run(x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, x: tf.Tensor) -> Any:
            return i + 1, tf.tanh(x - tf.reduce_sum(x * x, -1, keepdims=True))

        return tf.while_loop(lambda i, _: i < 9, body, (0, x), maximum_iterations=9)[1]

    compiled = tf.function(lambda x: run(tf.exp(x)), jit_compile=True, autograph=False)
    made = graph(lambda x: compiled(x), [2, 20])
    found = graph_time.seconds(made, dataclasses.replace(SPEED, loop_s=0.5))
    # The squares, their sum, the result and two counters, of which TensorFlow adds one; the
    # exponential is not repeated.
    assert found - graph_time.seconds(made, SPEED) == pytest.approx(9 * 5 * 0.5)


def test_a_compiled_loop_has_its_stack_once_and_copies_nothing_that_stays() -> None:
    """Neither the rows nor the matrix, which the loop passes on from iteration to iteration."""
    assert _of_time(50, 20).peak_bytes() == pytest.approx(4 * 50 * 2 * 20, rel=0.01)


def test_loops_that_wait_for_nothing_run_before_those_that_wait_for_them() -> None:
    """XLA multiplies all three before it sums the first one, so it holds all three."""

    def sums(x: tf.Tensor, y: tf.Tensor) -> Any:
        return [tf.reduce_sum(z, -1) for z in (x * y, x / y, tf.maximum(x, y))]

    found = loops(sums, [20, 50], [20, 50])
    assert found.peak_bytes() == 3 * 4000 + 80


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_product_in_a_compiled_loop_takes_its_operations_or_the_bytes_of_its_matrix(
    side: str,
) -> None:
    """With the matrix on the left, columns decide its speed, or else rows."""
    shape = {"left": [20, 2], "right": [2, 20]}[side]

    def seconds(**speeds: Any) -> float:
        function = tf.function(lambda x, w: _powers(x, w), jit_compile=True, autograph=False)
        machine = dataclasses.replace(SPEED, **speeds)
        return graph_time.seconds(graph(lambda x, w: function(x, w), shape, [20, 20]), machine)

    def _powers(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        def multiply(x: tf.Tensor) -> tf.Tensor:
            return w @ x if side == "left" else x @ w

        return tf.while_loop(lambda x: True, multiply, [x], maximum_iterations=9)[0]

    flops, matrix = 2 * 2 * 20 * 20, 4 * 20 * 20
    points = {f"loop_products_{side}": [(1.0, flops / 30.0), (3.0, flops / 6.0)]}
    assert seconds(**points) == pytest.approx(2.0 + 9 * 10.0, rel=0.01)  # the mean speed
    slow = [(1.0, matrix / 20.0)]
    assert seconds(loop_matrices=slow) == pytest.approx(2.0 + 9 * 20.0, rel=0.01)
    both = seconds(loop_matrices=slow, **points)
    assert both == pytest.approx(2.0 + 9 * 20.0, rel=0.01)


def test_a_function_is_not_computed_again_for_a_larger_tensor() -> None:
    found = loops(lambda x, y: x * tf.math.rsqrt(y), [20, 50], [20, 1])
    assert [loop.op.type for loop in found.loops] == ["Rsqrt", "Mul"]
    assert [loop.functions for loop in found.loops] == [{"Rsqrt": 20}, {}]


def test_the_memory_of_a_cluster_is_part_of_the_peak() -> None:
    compiled = tf.function(_softmax_gradient, jit_compile=True, autograph=False)
    found = graph_memory.peak_bytes(graph(lambda d, p: compiled(d, p), [20, 50], [20, 50]))
    assert found == 4000 + 80  # the product is freed before the result is written
