"""Tests of the distances between the uses of tensors."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.costs import graph_time, graph_walks
from tekso.framework.costs.tensor_reuse import Move, distances


class _NearAndFar:
    """Only tensors take time: a byte that is near 1 s, one that is far 1000 s."""

    streams = cluster_streams = ((100.0, 1.0), (101.0, 1e-3))
    products = batch_products = convolutions = filter_gradients = ()
    op_s = cluster_s = argument_s = loop_s = 0.0
    functions_per_s = cluster_elements_per_s = cluster_functions_per_s = math.inf
    cluster_sums_per_s = cluster_column_sums_per_s = math.inf
    functions: ClassVar[dict[str, float]] = {}
    cluster_functions: ClassVar[dict[str, float]] = {}


def _seconds(function: Any, *sizes: int) -> float:
    specs = [tf.TensorSpec([size]) for size in sizes]
    made = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return graph_time.seconds(made, _NearAndFar)  # type: ignore[arg-type]


def test_what_was_just_written_is_near_and_what_was_not_used_before_is_a_graph_away() -> None:
    moves = [
        Move([("x", 1.0)], [("a", 2.0)]),
        Move([("a", 2.0)], [("b", 4.0)]),
        Move(others=100.0),
        Move([("a", 2.0), ("w", 8.0)], [("c", 16.0)]),
    ]
    total = 3 + 6 + 100 + 26
    assert distances(moves) == [
        [(1.0, total), (2.0, 3 + 6 + 100)],  # a is read by the last one
        [(2.0, 3), (4.0, total - 3)],  # b is an output
        [],
        [(2.0, 6 + 100), (8.0, total), (16.0, 26)],
    ]


def test_a_tensor_that_is_used_in_every_run_is_a_run_away() -> None:
    """The weight is last used in the middle of the run before."""
    moves = [Move([("w", 5.0)]), Move([("x", 10.0)]), Move([("w", 5.0)]), Move([("y", 30.0)])]
    assert distances(moves)[0] == [(5.0, 35.0)]
    assert distances(moves)[2] == [(5.0, 15.0)]


def test_what_other_graphs_move_lies_between_two_runs() -> None:
    moves = [Move([("w", 5.0)], [("a", 2.0)]), Move([("a", 2.0)], [("g", 5.0)])]
    near, far = distances(moves), distances(moves, between=1000.0)
    assert near == [[(5.0, 14.0), (2.0, 7.0)], [(2.0, 7.0), (5.0, 7.0)]]
    assert far == [[(5.0, 1014.0), (2.0, 7.0)], [(2.0, 7.0), (5.0, 1007.0)]]


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 9)), max_size=3),
            st.lists(st.tuples(st.sampled_from("uvw"), st.integers(1, 9)), max_size=2),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_distances_of_reads_are_those_that_are_counted_one_move_at_a_time(raw: list) -> None:
    moves = [Move(*each) for each in raw]
    sizes = [sum(n for _, n in (*m.reads, *m.writes)) + m.others for m in moves]
    found = distances(moves)
    for number, move in enumerate(moves):
        assert [size for size, _ in found[number]] == [n for _, n in (*move.reads, *move.writes)]
        for (name, _), (_, distance) in zip(move.reads, found[number], strict=False):
            counted, at = 0, number
            while True:  # back to the last use, in the run before if there is none in this one
                at -= 1
                counted += sizes[at % len(moves)]
                if name in {
                    n for n, _ in (*moves[at % len(moves)].reads, *moves[at % len(moves)].writes)
                }:
                    break
            assert distance == counted
    assert all(0 <= d <= sum(sizes) for each in found for _, d in each)


def test_an_op_reads_what_was_just_written_faster_than_what_was_written_long_ago() -> None:
    def late(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        first = tf.negative(x)
        return [tf.abs(y), tf.negative(first)]

    # 8 bytes each: 4 x 8 bytes are moved, and everything is near.
    assert _seconds(lambda x: tf.negative(tf.negative(x)), 2) == pytest.approx(4 * 8)
    # The large ops between the two come first in the one graph, and lie between them in the other.
    near = _seconds(lambda x, y: (tf.abs(y), tf.negative(-x)), 2, 100)
    far = _seconds(late, 2, 100)
    assert near < far
    assert far - near == pytest.approx(2 * 8 * 999)  # written for long, and read after long


def test_the_loops_of_a_cluster_pass_tensors_on_in_a_cache() -> None:
    def halves(x: tf.Tensor) -> tf.Tensor:
        return x / tf.reduce_sum(x * x, keepdims=True)

    compiled = tf.function(halves, jit_compile=True, autograph=False)
    # The squares: 80 bytes; their sum: 44; the quotient: 84. It reads x again after 124 bytes; all
    # else is used again after fewer than 100.
    expected = 80 + 44 + 84 + 999 * 40
    assert _seconds(lambda x: compiled(x), 10) == pytest.approx(expected)


def test_what_a_loop_or_a_called_function_reads_and_returns_is_near() -> None:
    called = tf.function(tf.negative, autograph=False)

    def looped(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda _: True, lambda y: [-y], [x], maximum_iterations=1)[0]

    def run(inner: Any) -> Any:
        return lambda x, y: (tf.abs(y), tf.abs(inner(tf.exp(x))))

    # 800 far bytes are moved, then 8 by each op. Only the argument is used again after so many.
    far = 1000 * (800 + 8)
    assert _seconds(run(called), 2, 100) == pytest.approx(far + 5 * 8)
    # Besides, two counters and a limit of the loop, of 4 bytes.
    assert 5 * 8 < _seconds(run(looped), 2, 100) - far < 5 * 8 + 100


def test_what_a_collective_returns_is_near() -> None:
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}
        before = tf.abs(y)
        total = tf.raw_ops.CollectiveReduceV2(
            input=tf.exp(x), **keys, merge_op="Add", final_op="Id"
        )
        return before, tf.abs(total)

    # The time of the collective does not count.
    assert _seconds(run, 2, 100) == pytest.approx(1000 * (800 + 8) + 8 + 8 + 8)


def test_a_loop_in_a_cluster_moves_the_bytes_of_its_iterations_only() -> None:
    def looped(x: tf.Tensor) -> tf.Tensor:
        start = tf.exp(x)
        end = tf.while_loop(lambda _: True, lambda y: [-y], [start], maximum_iterations=2)[0]
        return tf.add(start, end)

    compiled = tf.function(looped, jit_compile=True, autograph=False)
    made = tf.function(lambda x: compiled(x), autograph=False).get_concrete_function(
        tf.TensorSpec([10])
    )
    exp, loop, add = (
        work.move for op in graph_walks.needed(made.graph) for work in graph_time._works(op)
    )
    assert exp.bytes == 2 * 40 and add.bytes == 3 * 40
    assert (loop.bytes, loop.others) == (0.0, pytest.approx(2 * 2 * 40, abs=50))  # and counters
    assert {name for name, _ in exp.writes} <= {name for name, _ in loop.reads}
