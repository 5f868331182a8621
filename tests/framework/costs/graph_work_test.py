"""Work of a traced graph against formulas by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.costs import graph_work


def count(function: Callable[..., Any], *shapes: tuple[int, ...]) -> graph_work.GraphWork:
    with tf.Graph().as_default() as graph:
        function(*(tf.raw_ops.Placeholder(dtype=tf.float32, shape=shape) for shape in shapes))
    return graph_work.count(graph)


def conv(dims: int) -> Callable[..., Any]:
    strides, of = [1, *[2] * dims, 1], {2: tf.nn.conv2d, 3: tf.nn.conv3d}[dims]
    return lambda x, w: of(x, w, strides, "SAME")


def transposed(shape: list[int]) -> Callable[..., Any]:
    strides = [1, *[2] * (len(shape) - 2), 1]
    of = tf.nn.conv2d_transpose if len(shape) == 4 else tf.nn.conv3d_transpose
    return lambda x, w: of(x, w, shape, strides, "SAME")


# A product of numbers counts two operations: it is added up.
@pytest.mark.parametrize(
    ("function", "shapes", "products"),
    [
        (tf.linalg.matmul, [(3, 5), (5, 7)], 3 * 5 * 7),
        (lambda x, y: tf.linalg.matmul(x, y, transpose_a=True), [(5, 3), (5, 7)], 3 * 5 * 7),
        (lambda x, y: tf.linalg.matmul(x, y, transpose_b=True), [(3, 5), (7, 5)], 3 * 5 * 7),
        (tf.linalg.matmul, [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
        (
            lambda x, y: tf.linalg.matmul(x, y, adjoint_a=True),
            [(2, 5, 3), (2, 5, 7)],
            2 * 3 * 5 * 7,
        ),
        (lambda x, y: tf.einsum("bld,dnh->blnh", x, y), [(2, 3, 5), (5, 7, 4)], 2 * 3 * 5 * 7 * 4),
        (lambda x, y: tf.einsum("...d,df->...f", x, y), [(2, 3, 5), (5, 7)], 2 * 3 * 5 * 7),
        # one dim of "..." is repeated, another is only in one of the two
        (
            lambda x, y: tf.einsum("...ij,...jk->...ik", x, y),
            [(4, 1, 3, 5), (2, 5, 7)],
            4 * 2 * 3 * 5 * 7,
        ),
        # [batch, height, width, channels], strides of 2: 4 × 3 places of 3 × 2 × 5 numbers, 7 times
        (conv(2), [(2, 8, 6, 5), (3, 2, 5, 7)], 2 * 4 * 3 * 3 * 2 * 5 * 7),
        (conv(3), [(2, 4, 8, 6, 5), (3, 2, 1, 5, 7)], 2 * 2 * 4 * 3 * 3 * 2 * 1 * 5 * 7),
        # every channel with 3 filters of its own
        (
            lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
            [(2, 8, 6, 5), (3, 2, 5, 3)],
            2 * 8 * 6 * 5 * 3 * 3 * 2,
        ),
        # every number that goes in is spread over 3 × 2 places of 7 channels
        (transposed([2, 8, 6, 7]), [(2, 4, 3, 5), (3, 2, 7, 5)], 2 * 4 * 3 * 5 * 3 * 2 * 7),
        (
            transposed([2, 4, 8, 6, 7]),
            [(2, 2, 4, 3, 5), (3, 2, 1, 7, 5)],
            2 * 2 * 4 * 3 * 5 * 3 * 2 * 1 * 7,
        ),
    ],
    ids=[
        "matmul", "matmul transpose_a", "matmul transpose_b", "batch matmul", "batch matmul adj_x",
        "einsum", "einsum of ...", "einsum of repeated ...", "conv2d", "conv3d", "depthwise",
        "conv2d transposed", "conv3d transposed",
    ],
)  # fmt: skip
def test_a_product_counts_two_for_each_pair_of_numbers(
    function: Any, shapes: list[tuple[int, ...]], products: int
) -> None:
    assert count(function, *shapes).flops == 2 * products


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize(
    ("filters", "groups"),
    [((3, 2, 6, 9), 1), ((3, 2, 2, 9), 3), ((3, 2, 1, 12), 6), ((3, 2, 6, 2), "depthwise")],
    ids=["one group", "three groups", "a group a channel", "depthwise"],
)
def test_gradients_of_a_convolution_are_as_many_products_as_the_convolution(
    filters: tuple[int, ...], groups: int | str, strides: int
) -> None:
    """Each pair of an input and a filter's number that is multiplied is used once in each."""

    def gradients(x: Any, w: Any) -> None:
        if groups == "depthwise":
            y = tf.nn.depthwise_conv2d(x, w, [1, strides, strides, 1], "SAME")
        else:
            y = tf.nn.conv2d(x, w, strides, "SAME")
        made.extend([y.op, *(dx.op for dx in tf.gradients(y, [x, w]))])

    made: list[Any] = []
    count(gradients, (2, 8, 4, 6), filters)
    height, width, before, after = filters
    outputs = before * after if groups == "depthwise" else after
    summed = height * width * (1 if groups == "depthwise" else before)
    products = 2 * (8 // strides) * (4 // strides) * outputs * summed
    assert [graph_work.op_flops(op) for op in made] == [2 * products] * 3


@pytest.mark.parametrize(
    ("function", "shape", "flops"),
    [
        (tf.tanh, (2, 3, 5), 2 * 3 * 5),
        (lambda x: tf.reduce_sum(x, 0), (2, 3, 5), 2 * 3 * 5),  # of what goes in
        (lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x), (2, 3, 5), 2 * 3 * 5),
        (lambda x: tf.math.segment_sum(x, [0, 1, 1]), (3, 5), 3 * 5),
        (lambda x: tf.einsum("ij->ji", x), (2, 3), 2 * 3),
        (
            lambda x: tf.nn.max_pool2d(x, (3, 2), (2, 2), "SAME"),
            (2, 8, 6, 5),
            2 * 4 * 3 * 5 * 3 * 2,
        ),
        (
            lambda x: tf.nn.avg_pool2d(x, (3, 2), (2, 2), "SAME"),
            (2, 8, 6, 5),
            2 * 4 * 3 * 5 * 3 * 2,
        ),
        (
            lambda x: tf.nn.avg_pool3d(x, (1, 3, 2), (1, 2, 2), "SAME"),
            (2, 3, 8, 6, 5),
            2 * 3 * 4 * 3 * 5 * 3 * 2,
        ),
        (lambda x: tf.reshape(tf.transpose(x), [6]), (2, 3), 0),
    ],
    ids=[
        "elementwise", "sum", "bias", "segments", "einsum of one", "max pool", "average pool",
        "pool of volumes", "moves",
    ],
)  # fmt: skip
def test_what_is_no_product_counts_one_a_number(
    function: Any, shape: tuple[int, ...], flops: int
) -> None:
    assert count(function, shape).flops == flops


def test_the_body_of_a_loop_counts_once_a_turn_and_of_branches_the_larger_one() -> None:
    def loop(x: Any, w: Any) -> Any:
        body = lambda i, x: (i + 1, tf.linalg.matmul(x, w))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 6, body, (0, x), maximum_iterations=6)

    def branch(x: Any, w: Any) -> Any:
        return tf.cond(tf.shape(x)[0] > 2, lambda: tf.linalg.matmul(x, w), lambda: tf.tanh(x))

    def case(x: Any, w: Any) -> Any:
        branches = lambda: tf.tanh(x), lambda: tf.linalg.matmul(x, w)
        return tf.switch_case(tf.shape(x)[0] - 2, branches)

    shapes = (3, 5), (5, 5)
    assert count(loop, *shapes).flops == 6 * 2 * 3 * 5 * 5
    assert count(branch, *shapes).flops == 2 * 3 * 5 * 5
    assert count(case, *shapes).flops == 2 * 3 * 5 * 5


def test_bytes_that_are_written_are_those_of_floats() -> None:
    def both(x: Any) -> Any:
        return tf.tanh(x), tf.cast(x, tf.bfloat16), tf.argmax(x, -1), tf.reshape(x, [-1])

    assert count(both, (2, 3, 5)).bytes_written == math.prod((2, 3, 5)) * (4 + 2)


def test_the_root_of_a_name_is_the_tensor_that_it_names() -> None:
    @tf.function(autograph=False)
    def named(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reshape(t, [-1]) for t in tf.identity_n([x * 2.0, tf.squeeze(y)])]

    spec = tf.TensorSpec([3, 4])
    traced = named.get_concrete_function(spec, spec).graph
    first, second = (graph_work.root(t) for t in traced.outputs)
    assert first.op.type == "Mul" and second is traced.inputs[1]


def test_ops_of_unknown_size_are_found_also_in_branches() -> None:
    def masked(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0) @ w)

    def whole(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.where(x[:, :1] > 0, x, 0.0) @ w)

    def branches(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.cond(x[0, 0] > 0, lambda: masked(x, w), lambda: whole(x, w))

    specs = tf.TensorSpec([6, 4]), tf.TensorSpec([4, 3])
    found = {
        function: [op.type for op in graph_work.unsized_ops(concrete.graph)]
        for function in (masked, whole, branches)
        if (concrete := tf.function(function, autograph=False).get_concrete_function(*specs))
    }
    assert found[whole] == []
    assert "MatMul" in found[masked] and sorted(found[masked]) == sorted(found[branches])


def test_long_chains_of_products_are_followed() -> None:
    def product(x: tf.Tensor) -> tf.Tensor:
        for _ in range(40):
            x = x * x
        for _ in range(500):
            x = x * tf.reshape(x, [-1])[:1]
        return x

    traced = tf.function(product, autograph=False).get_concrete_function(tf.TensorSpec([1]))
    assert graph_work.root(traced.graph.outputs[0]) is not None
