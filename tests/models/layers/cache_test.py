"""The cache against assignment to slices of NumPy arrays."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.models.layers import cache

B, S = 2, 5


@settings(max_examples=30, deadline=None)
@given(st.integers(1, S), st.data(), st.booleans())
def test_write_replaces_a_block_and_nothing_else(
    length: int, data: st.DataObject, own: bool
) -> None:
    starts = data.draw(st.lists(st.integers(0, S - length), min_size=B, max_size=B))
    starts = starts if own else starts[:1] * B
    r = np.random.default_rng(0)
    buffer, block = r.standard_normal([B, S, 3, 2]), r.standard_normal([B, length, 3, 2])

    got = cache.write(tf.constant(buffer), tf.constant(block), starts if own else starts[0])

    want = buffer.copy()
    for b, start in enumerate(starts):
        want[b, start : start + length] = block[b]
    np.testing.assert_array_equal(got, want)


def test_write_keeps_the_dtype_of_the_cache_and_works_in_a_graph() -> None:
    buffer, block = tf.zeros([B, S], tf.bfloat16), tf.ones([B, 2])

    got = tf.function(cache.write)(buffer, block, tf.constant(3))

    assert got.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(got, tf.float32), [[0, 0, 0, 1, 1]] * B)


def test_positions_of_a_block_count_from_its_first_element() -> None:
    np.testing.assert_array_equal(cache.positions_of_block(3, 2), [3, 4])
    np.testing.assert_array_equal(
        cache.positions_of_block(tf.constant([3, 0, 5]), 2), [[3, 4], [0, 1], [5, 6]]
    )


def test_positions_at_places_are_looked_up_by_row_or_for_all() -> None:
    one, rows = np.array([5, 6, 9]), np.array([[5, 6, 9], [1, 2, 3]])
    at = cache.positions_at
    np.testing.assert_array_equal(at(one, tf.constant([2, 0])), [9, 5])
    np.testing.assert_array_equal(at(rows, tf.constant([2])), [[9], [3]])
    np.testing.assert_array_equal(at(rows, tf.constant([[2, 1], [0, 1]])), [[9, 6], [1, 2]])
    np.testing.assert_array_equal(at(one, tf.constant([[2], [0]])), [[9], [5]])
