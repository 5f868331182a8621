"""The time of graphs with branches, loops, clusters and cores, counted by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import tensorflow as tf
from priced_graphs import graph

from tekso.framework.costs import graph_time
from tekso.framework.costs.this_machine import MachineSpeed

POINTS = [(1.0, 1e9)]
FREE = [(1.0, math.inf)]
SPEED = MachineSpeed(
    products=POINTS,
    batch_products=POINTS,
    convolutions=POINTS,
    filter_gradients=[(1.0, 1e8)],
    depthwise=[(1.0, 1e7)],
    depthwise_filter_gradients=[(1.0, 1e6)],
    streams=FREE,
    functions_per_s=math.inf,
    functions={},
    broadcasts_per_s=math.inf,
    copy_streams=FREE,
    turned_streams=FREE,
    slice_gradients=FREE,
    cross_entropies_per_s=math.inf,
    running_sums_per_s=math.inf,
    transforms_per_s=math.inf,
    cluster_streams=FREE,
    cluster_elements_per_s=math.inf,
    cluster_functions_per_s=math.inf,
    cluster_functions={},
    cluster_sums_per_s=math.inf,
    cluster_column_sums_per_s=math.inf,
    loop_products_left=FREE,
    loop_products_right=FREE,
    loop_matrices=FREE,
    lanes=1.0,
    op_s=0.0,
    product_s=0.0,
    cluster_s=0.0,
    convolution_s=0.0,
    argument_s=0.0,
    loop_s=0.0,
)
"""Only products and convolutions take time."""


def compiled(function: Any, *shapes: list[int]) -> Any:
    cluster = tf.function(function, autograph=False, jit_compile=True)
    return graph(lambda *args: cluster(*args), *shapes)


def changed(**fields: Any) -> MachineSpeed:
    return dataclasses.replace(SPEED, **fields)


def repeated(body: Any, times: int) -> Any:
    return lambda x: tf.while_loop(lambda _: True, body, [x], maximum_iterations=times)[0]


def test_of_two_branches_the_longer_one_counts() -> None:
    def branches(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

    assert graph_time.seconds(graph(branches, [10, 10]), SPEED) == pytest.approx(2 * 2000 / 1e9)


def test_the_gradient_of_a_filter_has_its_own_rate() -> None:
    def gradient(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=[3, 3, 4, 5], out_backprop=dy, strides=[1] * 4, padding="SAME"
        )

    flops = 2 * (2 * 8 * 8 * 5) * (3 * 3 * 4)
    found = graph_time.seconds(graph(gradient, [2, 8, 8, 4], [2, 8, 8, 5]), SPEED)
    assert found == pytest.approx(flops / 1e8)


def gradients(x: tf.Tensor, w: tf.Tensor, strides: int = 1) -> list[tf.Tensor]:
    """Returns a convolution and its gradients."""
    y = tf.nn.conv2d(x, w, strides, "SAME")
    return [y, *tf.gradients(y, [x, w])]


def test_few_operations_per_byte_slow_a_convolution_only_if_its_bytes_take_longer() -> None:
    """A filter of one pixel has fewer operations per byte than any that is measured."""
    fast = {"convolutions": [(1e3, 1e9)], "filter_gradients": [(1e3, 1e9)]}
    made = graph(gradients, [2, 8, 8, 4], [1, 1, 4, 5])
    flops, moved = 2 * (2 * 8 * 8) * 4 * 5, 4 * (2 * 8 * 8 * (4 + 5) + 4 * 5)
    assert graph_time.seconds(made, changed(**fast)) == pytest.approx(3 * flops / 1e9, rel=1e-3)
    slow = changed(**fast, streams=[(1.0, 1e6)])
    assert graph_time.seconds(made, slow) >= 3 * moved / 1e6


def test_few_operations_per_byte_do_not_slow_a_product_whose_bytes_count_apart() -> None:
    """The matrix of a product of few rows, as in a loop over time, comes from a cache."""
    made = graph(lambda x, w: x @ w, [4, 256], [256, 1024])
    flops, moved = 2 * 4 * 256 * 1024, 4 * (4 * 256 + 256 * 1024 + 4 * 1024)
    of_many = {"products": [(1e3, 1e9), (1e4, 1e10)]}
    assert graph_time.seconds(made, changed(**of_many)) == pytest.approx(flops / 1e9, rel=1e-3)
    slow = changed(**of_many, streams=[(1.0, 1e8)])
    assert graph_time.seconds(made, slow) == pytest.approx(flops / 1e9 + moved / 1e8, rel=1e-3)


@pytest.mark.parametrize(
    ("channels", "groups", "vectors"),
    [
        ((3, 16), 1, (16, 16, 16)),  # of the image, one vector is computed for 3 channels
        ((16, 20), 1, (32, 16, 32)),
        ((32, 32), 1, (32, 32, 32)),
        ((32, 64), 8, (16 * 8, 16 * 8, 16 * 8)),  # a vector for each group
    ],
    ids=["few before", "part of the last", "full", "groups"],
)
def test_a_convolution_computes_whole_vectors_of_channels(
    channels: tuple[int, int], groups: int, vectors: tuple[int, int, int]
) -> None:
    before, after = channels
    made = graph(gradients, [2, 8, 8, before], [3, 3, before // groups, after])
    each = 2 * (2 * 8 * 8) * 9 / 1e9
    of_y, of_x, of_w = vectors
    expected = each * (of_y * before + of_x * after + of_w * before) / groups
    rates = {"filter_gradients": [(1.0, 1e9)], "lanes": 16.0}
    found = graph_time.seconds(made, changed(**rates))
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_copy_of_what_was_just_written_takes_less_time() -> None:
    speed = dataclasses.replace(SPEED, copy_streams=[(1e3, 100.0), (1e6, 10.0)])

    def after(other: int) -> Any:
        def function(x: Any, y: Any) -> Any:
            first = x + 1.0
            with tf.control_dependencies([first]):
                between = y + 1.0  # moves 8 bytes for each of its numbers
            with tf.control_dependencies([between]):
                return tf.transpose(first), between

        return graph(function, [4, 8], [other])

    near, far = (graph_time.seconds(after(other), speed) for other in (1, 1 << 20))
    assert near == pytest.approx(2 * 128 / 100, rel=0.05)  # the new order of the dims is 8 bytes
    assert far == pytest.approx(128 / 10 + 128 / 100, rel=0.1)  # the result is written to a cache


def test_functions_and_running_sums_have_rates_of_their_own() -> None:
    rates = {"Pow": 10.0, "Tan": 5.0, "FloorMod": 4.0, "StatelessRandomNormalV2": 2.0}
    speed = changed(functions=rates, running_sums_per_s=20.0)

    def seconds(function: Any) -> float:
        return graph_time.seconds(graph(function, [4, 5]), speed)

    def drawn(x: tf.Tensor) -> tf.Tensor:
        key = tf.cast(x[:1, 0], tf.uint64)
        return tf.raw_ops.StatelessRandomNormalV2(
            shape=[4, 5], key=key, counter=tf.concat([key, key], 0), alg=1
        )

    assert seconds(lambda x: x**1.7) == pytest.approx(20 / 10)
    assert seconds(tf.tan) == pytest.approx(20 / 5)
    assert seconds(lambda x: x % 3.0) == pytest.approx(20 / 4)
    assert seconds(drawn) == pytest.approx(20 / 2)
    for simple in (lambda x: x**2.0, lambda x: x**0.5, tf.tanh):
        assert seconds(simple) == 0
    assert seconds(lambda x: tf.cumsum(x, 1)) == seconds(tf.math.cumprod) == 20 / 20


@pytest.mark.parametrize(
    ("function", "shape", "elements"),
    [
        (tf.signal.rfft, [3, 16], 48 * 4),
        (lambda x: tf.signal.irfft(tf.cast(x, tf.complex64)), [3, 9], 48 * 4),
        (lambda x: tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64))), [3, 4, 8], 96 * 5),
    ],
)
def test_a_fourier_transform_takes_n_log_n(function: Any, shape: list[int], elements: int) -> None:
    slow = changed(transforms_per_s=2.0)
    assert graph_time.seconds(graph(function, shape), slow) == pytest.approx(elements / 2.0)


def test_depthwise_convolutions_and_their_gradients_have_rates_of_their_own() -> None:
    def depthwise(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        y = tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME")
        return [y, *tf.gradients(y, [x, w])]

    made = graph(depthwise, [2, 8, 8, 4], [3, 3, 4, 1])
    flops, moved = 2 * (2 * 8 * 8 * 4) * 9, 4 * (2 * 2 * 8 * 8 * 4 + 3 * 3 * 4)
    assert graph_time.seconds(made, SPEED) == pytest.approx(2 * flops / 1e7 + flops / 1e6, rel=1e-3)
    # Their rates contain the time of the tensors, so it limits those of few operations per byte.
    of_many = {"depthwise": [(1e3, 1e7)], "depthwise_filter_gradients": [(1e3, 1e6)]}
    shape = 4 * 4  # an input of the gradients
    limited = 1e3 * ((2 * moved + shape) / 1e7 + (moved + shape) / 1e6)
    assert graph_time.seconds(made, changed(**of_many)) == pytest.approx(limited, rel=1e-3)


@pytest.mark.parametrize(
    ("axis", "kind"), [(1, "cluster_sums_per_s"), (0, "cluster_column_sums_per_s")]
)
def test_a_sum_in_a_cluster_takes_the_time_of_what_it_adds(axis: int, kind: str) -> None:
    made = compiled(lambda x: tf.reduce_sum(x, axis), [10, 20])
    assert graph_time.seconds(made, SPEED) == 0
    assert graph_time.seconds(made, changed(**{kind: 1e3})) == pytest.approx(200 / 1e3)


def test_a_function_of_a_cluster_has_a_rate_of_its_own_or_that_of_most() -> None:
    made = compiled(lambda x: tf.sin(x) * tf.exp(tf.tanh(x)), [10, 20])
    speed = changed(cluster_functions_per_s=1e3, cluster_functions={"Sin": 10.0})
    assert graph_time.seconds(made, speed) == pytest.approx(200 / 10.0 + 400 / 1e3)


def test_a_gradient_of_a_slice_has_the_rate_for_the_dims_of_the_sliced_tensor() -> None:
    """Also where the slice has fewer, as `x[0]` has."""

    def gradient(x: tf.Tensor) -> tf.Tensor:
        y = x[0]
        return tf.gradients(y, x, y)

    speed = changed(slice_gradients=[(2.0, 10.0), (3.0, 5.0), (5.0, 1.0)])
    for shape, elements, rate in (([4, 6], 6, 10), ([4, 2, 3], 6, 5), ([4, 1, 2, 1, 3], 6, 1)):
        assert graph_time.seconds(graph(gradient, shape), speed) == pytest.approx(elements / rate)
    assert graph_time.seconds(graph(gradient, [1, 6]), speed) == 0  # a copy


def test_computing_and_moving_overlap_in_a_loop_of_a_cluster() -> None:
    made = compiled(lambda x: x * 2.0 + 1.0, [1000])
    elements, moved = 2000 / 1e6, 8000 / 1e6
    speed = changed(cluster_elements_per_s=1e6, cluster_streams=[(1.0, 1e6)])
    assert graph_time.seconds(made, speed) == pytest.approx(max(elements, moved))


def test_an_iteration_moves_its_bytes_once_in_each() -> None:
    def moved(times: int, **in_cluster: Any) -> float:
        function = compiled if in_cluster else graph
        return graph_time.moved_bytes(function(repeated(lambda y: [-y], times), [1000]))

    each = moved(4) - moved(3)
    assert 8000 <= each < 8000 + 100  # counters of the loop
    assert moved(9) - moved(3) == pytest.approx(6 * each)
    each = moved(4, in_cluster=True) - moved(3, in_cluster=True)
    assert 8000 <= each < 8000 + 100
    assert moved(9, in_cluster=True) - moved(3, in_cluster=True) == pytest.approx(6 * each)


def test_between_two_runs_of_a_graph_lies_what_the_others_move() -> None:
    small, large = graph(lambda x: -x, [10]), graph(lambda x: -x, [300])
    assert graph_time.moved_by_others([(3, small), (2, large)]) == [2 * 2400, 3 * 80]
    assert graph_time.moved_by_others([(3, small)]) == [0.0]


def test_an_op_that_is_not_short_is_given_to_another_core() -> None:
    """Two ops of 50 us after a product of 2 ms; those of 1 us stay on the core of the product.

    The other core takes 5 us until it finds what is put on the stack of the first.
    """
    both = graph(lambda a: [f(y) for y in [a @ a] for f in (tf.negative, tf.abs)], [100, 100])
    product = 2 * 100**3 / 1e9
    for seconds, expected in ((5e-5, product + 2 * 5e-5 + 5e-6), (1e-6, product + 3 * 1e-6)):
        found = graph_time.elapsed_seconds(both, changed(op_s=seconds), cores=2)
        assert found == pytest.approx(expected)
