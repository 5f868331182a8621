"""The peak of graphs whose tensors can be counted by hand; inputs do not count."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import processes
import pytest
import tensorflow as tf
from priced_graphs import graph

from tekso.framework.costs.graph_memory import changes_of, peak_bytes, peak_of, tensors_of
from tekso.framework.weight_update import select

BYTES = 4000  # of a tensor of 1,000 numbers


def test_an_op_overwrites_an_input_that_nothing_else_reads() -> None:
    def read_twice(x: tf.Tensor) -> tf.Tensor:
        y = tf.exp(x)
        return tf.tanh(y) * y

    assert peak_bytes(graph(lambda x: tf.tanh(tf.exp(x)), [1000])) == BYTES
    assert peak_bytes(graph(read_twice, [1000])) == 2 * BYTES


@pytest.mark.parametrize("of_condition", [[], [1]])
def test_a_tensor_that_a_scalar_condition_selects_is_not_copied(of_condition: list[int]) -> None:
    x, y = (tf.random.stateless_normal([1 << 17], [1, seed]) for seed in (1, 2))
    size = 4 * x.shape.num_elements()

    def function(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        condition = tf.reshape(x[0] > y[0], of_condition)
        return select(condition, x, y)

    copied = size if of_condition else 0
    assert peak_bytes(graph(function, x.shape, y.shape), least=size) == copied
    assert measured(function, x, y) == copied


@pytest.mark.parametrize(
    ("change", "arrays"),
    [
        (lambda x: 1.0 * x, 1),
        (lambda x: tf.identity(1.0) * x, 1),
        (lambda x: 2.0 * x, 2),
        (lambda x: x / tf.ones([1]), 1),
        (lambda x: tf.ones([1]) / x, 2),
        (lambda x: tf.reduce_sum(x, tf.zeros([0], tf.int32)), 1),
        (lambda x: tf.reduce_sum(x, [1], keepdims=True), 1),
    ],
    ids=[
        "product",
        "product with a copy",
        "other product",
        "quotient",
        "reciprocal",
        "sum",
        "sum of size one",
    ],
)
def test_a_product_with_one_and_a_sum_that_adds_nothing_are_their_input(
    change: Any, arrays: int
) -> None:
    x = tf.random.stateless_normal([1 << 17, 1], [1, 2])
    size = 4 * x.shape.num_elements()

    def function(x: tf.Tensor) -> Any:
        y = tf.exp(x)
        return y, change(y)

    assert peak_bytes(graph(function, x.shape), least=size) == arrays * size
    # Tests before this one may leave some bytes.
    assert arrays <= measured(function, x) / size < arrays + 0.6


def test_a_product_does_not_overwrite_its_input() -> None:
    assert peak_bytes(graph(lambda x: (x @ x) @ x, [10, 10])) == 2 * 400


def test_an_output_of_the_graph_stays_though_no_op_reads_it() -> None:
    found = peak_bytes(graph(lambda x: (tf.exp(x), tf.tile(tf.tanh(x), [3])), [1000]))
    assert found == (1 + 1 + 3) * BYTES


def test_an_output_of_an_op_that_nothing_reads_is_freed_at_once() -> None:
    """The indices, which are as large as the values."""

    def function(x: tf.Tensor) -> tf.Tensor:
        values, _ = tf.math.top_k(x, 1000)
        return tf.tile(values, [3])

    assert peak_bytes(graph(function, [1000])) == (1 + 3) * BYTES


def test_an_op_waits_for_its_control_inputs() -> None:
    """As rematerialization does; otherwise, both large tensors would exist at once."""

    def function(x: tf.Tensor) -> tf.Tensor:
        first = tf.reduce_sum(tf.exp(x))
        with tf.control_dependencies([first]):
            second = tf.reduce_sum(tf.tanh(x))
        return first + second

    assert BYTES < peak_bytes(graph(function, [1000])) <= BYTES + 8


def test_what_a_cluster_needs_beside_its_output_counts_from_the_least_bytes_on() -> None:
    cluster = tf.function(
        lambda d, p: p * (d - tf.reduce_sum(d * p, -1, keepdims=True)),
        jit_compile=True,
        autograph=False,
    )
    made = graph(lambda d, p: cluster(d, p), [20, 50], [20, 50])
    assert peak_bytes(made) == BYTES + 80  # the product, then the result, and the sums
    assert peak_bytes(made, least=BYTES + 81) == 0


def learned_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The gradient of 20 iterations, which needs the state of each."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = tf.while_loop(lambda *_: True, lambda y: [tf.tanh(y @ w)], [x], maximum_iterations=20)[
            0
        ]
    return tape.gradient(y, w)


def measured(function: Any, *inputs: tf.Tensor) -> int:
    """Returns the bytes that a function holds at once, beside its inputs."""
    run = tf.function(function, autograph=False)
    run(*inputs)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    run(*inputs)
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)


def test_a_weight_that_no_iteration_changes_is_not_saved_for_each() -> None:
    """Weights of 4 MB, and states of 16 kB; at most 10 of the 20 iterations overlap."""
    x, w = tf.ones([4, 1000]), tf.zeros([1000, 1000])
    for found in (peak_bytes(graph(learned_loop, x.shape, w.shape)), measured(learned_loop, x, w)):
        assert 2 * 4e6 < found < 15 * 4e6  # not 20 times


def test_the_state_of_a_loop_counts_once() -> None:
    def loop(x: tf.Tensor) -> tf.Tensor:
        body = lambda y: [tf.tanh(y * 0.5)]  # noqa: E731
        return tf.while_loop(lambda *_: True, body, [x], maximum_iterations=9)[0]

    found = peak_bytes(graph(loop, [1 << 20]))
    # The allocator may give a tensor a free piece of almost twice its size.
    assert 0.99 * found < measured(loop, tf.ones([1 << 20])) < 2 * found


SIDE = 1 << 10


@pytest.mark.parametrize(
    ("start", "megabytes"),
    [
        (lambda: tf.reshape(tf.zeros([SIDE, SIDE]), [SIDE * SIDE]), 4),
        (lambda: tf.linalg.band_part(tf.ones([4 * SIDE, SIDE]), -1, 0), 16),
        (lambda: tf.cast(tf.range(SIDE * SIDE), tf.float32), 4),
        (lambda: tf.cast(tf.range(4 * SIDE * SIDE), tf.float32), 0),
    ],
    ids=["zeros", "mask", "range", "long range"],
)
def test_what_tensorflow_computes_once_stays_in_memory(start: Any, megabytes: int) -> None:
    """The start of a loop; not if it is made of smaller tensors and has more than 10 MiB."""

    def loop(x: tf.Tensor) -> tf.Tensor:
        body = lambda y: [y + x]  # noqa: E731
        return tf.reduce_sum(
            tf.while_loop(lambda *_: True, body, [start()], maximum_iterations=9)[0]
        )

    run = tf.function(loop, autograph=False)
    x = tf.constant(1.0)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    run(x)
    stays = tf.config.experimental.get_memory_info("CPU:0")["current"] - before
    # The allocator may give a tensor a free piece of almost twice its size.
    assert megabytes << 20 <= stays <= 2 * megabytes << 20
    assert sum(tensors_of(graph(loop, []), least=1 << 18).constants) == megabytes << 20


def test_the_items_of_a_list_count_if_each_has_the_least_bytes() -> None:
    """20 states of 400 bytes, and weights of 40 kB."""
    made = graph(learned_loop, [1, 100], [100, 100])
    whole, large = peak_bytes(made), peak_bytes(made, least=1000)
    assert whole - large > 20 * 400
    assert large % 40_000 == 0


def test_the_items_of_a_list_are_arrays_of_their_own() -> None:
    """8 rows of 4 kB: one array of as many bytes could hold twice as much in the allocator."""
    made = graph(lambda x: tf.scan(tf.add, tf.tanh(x)), [8, 1000])
    items = {
        (size, change.items[name])
        for change in tensors_of(made, least=4000).changes()
        for name, size in change.takes.items()
        if name in change.items and size
    }
    assert items == {(8 * 4000, 8)}


def test_the_list_of_a_tensor_that_a_loop_reads_has_a_copy_of_all_its_rows() -> None:
    """A stack of 8 rows of 4 kB, its list, and the list of the sums."""

    def scan(x: tf.Tensor) -> tf.Tensor:
        return tf.scan(tf.add, tf.tanh(x))

    found = peak_bytes(graph(scan, [8, 1000]), least=4000)
    assert 2 * 32_000 <= found <= 3 * 32_000 + 3 * 4000  # and the stack of the sums, and states


@pytest.mark.parametrize("kind", ["cond", "switch_case"])
def test_what_a_branch_saves_for_its_gradient_is_held(kind: str) -> None:
    """A tanh of 12 MB."""

    def learned(x: tf.Tensor, w: tf.Tensor) -> Any:
        no, yes = lambda: x * 0.0, lambda: tf.linalg.matmul(tf.tanh(x @ w), w, transpose_b=True)
        with tf.GradientTape() as tape:
            tape.watch(w)
            is_large = tf.shape(x)[0] > 2
            if kind == "cond":
                y = tf.cond(is_large, yes, no)
            else:
                y = tf.switch_case(tf.cast(is_large, tf.int32), (no, yes))
            loss = tf.reduce_sum(tf.exp(y))
        return tape.gradient(loss, w)

    made = graph(learned, [10_000, 100], [100, 300])
    changes = list(tensors_of(made).changes())
    (op,) = [change for change in changes if 12e6 in change.takes.values()]
    (name,) = [name for name, size in op.takes.items() if size == 12e6]
    assert made.get_tensor_by_name(name).dtype == tf.variant
    reader = next(change.op for change in changes if name in change.frees)
    assert reader.startswith("gradient")


def test_a_value_that_only_the_gradient_of_a_constant_needs_is_not_saved() -> None:
    """TensorFlow held 4 lists of such a loop in a step; with the values for constants, it has 6."""

    def gradients(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        body = lambda y: [y + tf.nn.gelu(y @ w)]  # noqa: E731
        last = tf.while_loop(lambda _: True, body, [x], maximum_iterations=10)[0]
        found: list[tf.Tensor] = tf.gradients(last, [x, w])
        return found

    found = peak_bytes(graph(gradients, [10, 100], [100, 100]), least=4000)
    gradient_of_w, state = 40_000, 4000  # bytes; an iteration adds to the gradient
    assert 4 * 10 * state < found < 4 * 10 * state + 2 * gradient_of_w + 10 * state


def filled(count: int, *, given: str, copies: bool) -> Any:
    """Returns a function that fills a list in a loop, and returns an item, which is not copied.

    Args:
      count: number of items.
      given: the list at the start: "empty", or "full" of items, whose tensor is returned too.
      copies: whether an IdentityN has the list beside another tensor, outside the loop and in it.
    """

    def beside(*tensors: tf.Tensor) -> Any:
        return tf.identity_n(tensors) if copies else tensors

    def function(x: tf.Tensor) -> Any:
        rows = tf.tile(x[tf.newaxis], [count, 1])

        def body(i: tf.Tensor, items: tf.Tensor) -> Any:
            item = tf.tanh(x)
            if given == "empty":
                items = tf.raw_ops.TensorListPushBack(input_handle=items, tensor=item)
            else:
                items = tf.raw_ops.TensorListSetItem(input_handle=items, index=i, item=item)
            return beside(i + 1, items)

        start = tf.raw_ops.TensorListFromTensor(tensor=rows, element_shape=x.shape)
        if given == "empty":
            start = tf.raw_ops.EmptyTensorList(
                element_shape=x.shape, max_num_elements=count, element_dtype=x.dtype
            )
        state = beside(tf.constant(0), start)
        _, items = tf.while_loop(lambda i, _: i < count, body, state, maximum_iterations=count)
        item = tf.raw_ops.TensorListGetItem(
            input_handle=items, index=0, element_shape=x.shape, element_dtype=x.dtype
        )
        return (item, rows) if given == "full" else item

    return function


@pytest.mark.parametrize(("given", "count"), [("empty", 7), ("full", 7 + 7 + 1)])
def test_a_list_beside_another_tensor_in_an_op_has_its_items(given: str, count: int) -> None:
    for copies in (False, True):
        found = peak_bytes(graph(filled(7, given=given, copies=copies), [1000]))
        assert found == pytest.approx(count * BYTES, abs=20)  # numbers of the loop


def test_a_loop_that_was_not_traced_here_has_the_tensors_around_it() -> None:
    made = graph(filled(7, given="full", copies=False), [1000])
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(made.as_graph_def(), name="")
    assert peak_bytes(imported, least=1000) == (7 + 7) * BYTES  # the rows and their list


def test_tensors_that_the_statistics_leave_out_do_not_count() -> None:
    made = graph(lambda x, y: (tf.exp(x) * 2.0, tf.exp(y) * 2.0), [100], [10])
    assert peak_bytes(made) == 440
    assert peak_bytes(made, least=400) == 400


def test_an_op_whose_inputs_are_ready_early_frees_them_early() -> None:
    """In the order of the graph, the large tensor would stay until the last product: 68,804."""

    def function(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        large = tf.matmul(x, x)
        first = tf.reduce_sum(large)
        later = tf.matmul(tf.matmul(tf.matmul(y, y), y), y)
        return first + tf.reduce_sum(later) * tf.reduce_max(large)

    found = peak_bytes(graph(function, [100, 100], [60, 60]))
    assert found == 40000 + 14400 + 2 * 4  # without the second product: the large one is freed


def test_equal_ops_are_one_tensor_as_tensorflow_measures() -> None:
    done = processes.run([Path(__file__).with_name("equal_ops_program.py")])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The product, one difference and the second product; with both differences 4 MiB.
    assert found["planned"] == pytest.approx(3 * 4 * 512 * 512, rel=0.01)
    # Beside other programs, threads sometimes run the ops in another order.
    assert statistics.median(found["measured"]) == pytest.approx(found["planned"], rel=0.01)


def test_an_op_that_equals_one_that_no_output_needs_runs() -> None:
    """TensorFlow removes the latter before it merges equal ops."""

    def function(x: tf.Tensor) -> tf.Tensor:
        tf.exp(x)
        return tf.cumsum(tf.exp(x)) + tf.where(x > 0.0, x, tf.zeros([1000]))

    def with_another(x: tf.Tensor) -> tf.Tensor:
        tf.zeros([2000])  # its 0 is the first one
        return function(x)

    found = tensors_of(graph(with_another, [1000]))
    assert "Exp" in [op.type for op in found.ops]
    assert BYTES in found.constants


def test_equal_ops_of_a_graph_without_outputs_are_one_tensor() -> None:
    with tf.Graph().as_default() as made:
        x = tf.compat.v1.placeholder(tf.float32, [1000])
        y = tf.cumsum(tf.exp(x)) * tf.exp(x)
    made.outputs = []  # as of a part of a graph, whose outputs are given with its ops
    found = peak_of(changes_of(made, made.get_operations(), [y]))
    assert found == 2 * BYTES


def test_a_sigmoid_that_waits_for_the_gradient_is_not_the_saved_one() -> None:
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            for _ in range(8):
                x = tf.nn.silu(tf.matmul(x, w))
        return tf.reduce_sum(tape.gradient(x, w))

    found = peak_bytes(graph(function, [512, 512], [512, 512]))
    # Of each product, the product and its SiLU are saved; with the sigmoids, it would be 25 MiB.
    assert found == pytest.approx(18 << 20, rel=0.01)
    x = tf.ones([512, 512])
    assert found == pytest.approx(measured(function, x, x), rel=0.15)


def test_the_simulated_memory_is_that_which_tensorflow_measures() -> None:
    def function(x: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        parts = tf.stack([tf.sin(x * (c + float(i))) for i in range(8)])
        return tf.reduce_sum(tf.cumsum(parts))

    size = 1 << 18
    found = peak_bytes(graph(function, [size], []))
    # The order of the ops is TensorFlow's.
    assert found == pytest.approx(measured(function, tf.ones([size]), tf.constant(0.5)), rel=0.25)


def test_a_loop_keeps_what_its_gradient_needs_and_an_unchanged_weight_once() -> None:
    x, w = tf.ones([1024, 256]), tf.zeros([256, 256])
    found = peak_bytes(graph(learned_loop, x.shape, w.shape))
    assert found == pytest.approx(measured(learned_loop, x, w), rel=0.25)
