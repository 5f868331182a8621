"""The bytes that overlapping iterations can add, counted by hand, and against measured memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.costs.graph_memory import COUNTED_BYTES
from tekso.framework.costs.loop_overlap import waiting_bytes

LENGTH, ROWS, SIZE = 30, 64, 56
X, W = [LENGTH, ROWS, SIZE], [SIZE, SIZE]
XS_BYTES, W_BYTES = 4 * LENGTH * ROWS * SIZE, 4 * SIZE * SIZE


def recurrent(at_once: int, *, length: int = LENGTH) -> Callable[..., Any]:
    """The last state of h = tanh(h w + x) for each x."""

    def run(xs: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda t, _: t < length,
            lambda t, h: (t + 1, tf.tanh(h @ w + xs[t])),
            (0, tf.zeros([ROWS, SIZE])),
            parallel_iterations=at_once,
        )[1]

    return run


def gradients(function: Callable[..., Any], *, of_xs: bool = True) -> Callable[..., Any]:
    def run(xs: tf.Tensor, w: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([xs, w])
            y = tf.reduce_sum(function(xs, w))
        return tape.gradient(y, [xs, w] if of_xs else w)

    return run


def waiting(function: Callable[..., Any]) -> float:
    specs = tf.TensorSpec(X), tf.TensorSpec(W)
    return waiting_bytes(tf.function(function, autograph=False).get_concrete_function(*specs).graph)


@pytest.mark.parametrize(
    ("at_once", "length", "others"), [(1, LENGTH, 0), (4, LENGTH, 3), (10, LENGTH, 9), (10, 3, 2)]
)
def test_gradients_wait_for_their_sums_in_the_iterations_that_overlap(
    at_once: int, length: int, others: int
) -> None:
    loop = recurrent(at_once, length=length)
    assert waiting(gradients(loop)) == others * (XS_BYTES + W_BYTES)
    assert waiting(gradients(loop, of_xs=False)) == others * max(W_BYTES, 4 * ROWS * SIZE)
    assert waiting(loop) == others * 4 * ROWS * SIZE  # rows, which wait for the state


def test_a_loop_in_a_branch_or_a_loop_counts_and_one_in_a_cluster_does_not() -> None:
    loop = gradients(recurrent(10), of_xs=False)
    alone = waiting(loop)

    def in_branch(xs: tf.Tensor, w: tf.Tensor) -> Any:
        return tf.cond(w[0, 0] > 0, lambda: loop(xs, w), lambda: w)

    def in_loop(xs: tf.Tensor, w: tf.Tensor) -> Any:
        return tf.while_loop(lambda _: True, lambda w: [loop(xs, w)], [w], maximum_iterations=2)

    assert alone > 0
    assert waiting(in_branch) == waiting(in_loop) == alone
    assert waiting(lambda xs, w: tf.function(loop, jit_compile=True)(xs, w)) == 0


def test_results_of_the_only_chain_of_values_do_not_wait() -> None:
    def run(xs: tf.Tensor, w: tf.Tensor) -> Any:
        body = lambda h: [tf.tanh(h @ w) * tf.exp(h)]  # noqa: E731
        return tf.while_loop(lambda _: True, body, [xs[0]], maximum_iterations=7)

    assert waiting(run) == 0


def test_no_run_holds_more_than_what_can_wait() -> None:
    xs, w = tf.random.stateless_normal(X, [1, 2]), tf.random.stateless_normal(W, [3, 4])

    def most(at_once: int) -> int:
        run = tf.function(gradients(recurrent(at_once)), autograph=False)
        found = []
        for _ in range(10):
            before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            tf.config.experimental.reset_memory_stats("CPU:0")
            run(xs, w)
            found.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
        return max(found[1:])

    assert XS_BYTES > COUNTED_BYTES
    # The allocator may give a tensor a free piece of almost twice its size.
    assert most(10) <= most(1) + waiting(gradients(recurrent(10))) + 2 * XS_BYTES
