"""The cache against assignment to slices of NumPy arrays, and hypotheses against copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework import ops
from tekso.framework.context import StepContext, filling_in_place
from tekso.framework.primitives.attention import attend, attend_known, mean_probabilities
from tekso.models.layers import cache

B, S, K, H = 2, 5, 3, 2


def filled(seed: int = 0, size: int = S) -> tuple[dict[str, tf.Tensor], np.ndarray]:
    """A cache with numbers in it, and its keys in the order of texts."""
    keys = np.random.default_rng(seed).standard_normal([B, size, K, H]).astype(np.float32)
    full = tf.constant(keys)
    return cache.write(cache.empty(B, size, K, H, "float32"), full, -full, 0), keys


def in_order(kept: dict[str, tf.Tensor], name: str) -> np.ndarray:
    """[B, S, K, H] of a cache without hypotheses."""
    return np.asarray(kept[name])[:, :, :, 0].transpose([0, 2, 1, 3])


@settings(max_examples=30)
@given(st.integers(1, S), st.data(), st.booleans())
def test_write_replaces_a_block_and_nothing_else(
    length: int, data: st.DataObject, own: bool
) -> None:
    starts = data.draw(st.lists(st.integers(0, S - length), min_size=B, max_size=B))
    starts = starts if own else starts[:1] * B
    kept, want = filled()
    block = np.random.default_rng(1).standard_normal([B, length, K, H]).astype(np.float32)

    got = cache.write(kept, tf.constant(block), tf.constant(-block), starts if own else starts[0])

    for b, start in enumerate(starts):
        want[b, start : start + length] = block[b]
    np.testing.assert_array_equal(in_order(got, "k"), want)
    np.testing.assert_array_equal(in_order(got, "v"), -want)


def test_filling_in_place_writes_the_same_and_leaves_the_cache_that_is_read_again_alone() -> None:
    first, second = (tf.random.stateless_normal([B, 1, K, H], [seed, 0]) for seed in (1, 2))

    @tf.function(autograph=False)
    def write(fill: Any, position: tf.Tensor) -> Any:
        old = cache.write(cache.empty(B, S, K, H, "float32"), first, -first, position, fill=fill)
        new = cache.write(old, second, -second, position + 1, fill=fill)
        return old, new

    want = write(functools.partial(ops.fill_rows, StepContext()), tf.constant(2))
    got = write(functools.partial(ops.fill_rows, filling_in_place(StepContext())), tf.constant(2))
    for one, other in zip(want, got, strict=True):
        for name in ("k", "v"):
            np.testing.assert_array_equal(one[name], other[name])
    assert np.abs(in_order(got[1], "k")[:, 3]).min() > 0
    assert not in_order(got[0], "k")[:, 3].any()


def test_filling_in_place_copies_no_buffer() -> None:
    ctx = filling_in_place(StepContext())
    graph = tf.function(
        lambda: cache.write(
            cache.empty(B, S, K, H, "float32"),
            *[tf.ones([B, 1, K, H])] * 2,
            0,
            fill=functools.partial(ops.fill_rows, ctx),
        ),
        autograph=False,
    )
    operations = {node.op for node in graph.get_concrete_function().graph.as_graph_def().node}
    assert "ScatterNdNonAliasingAdd" in operations
    assert "TensorScatterUpdate" not in operations


def test_write_keeps_the_dtype_of_the_cache_and_works_in_a_graph() -> None:
    block = tf.ones([B, 2, K, H])

    @tf.function(autograph=False)
    def write(position: tf.Tensor) -> Any:
        return cache.write(cache.empty(B, S, K, H, "bfloat16"), block, block, position)

    got = write(tf.constant(3))
    assert got["k"].dtype == tf.bfloat16
    written = in_order({"k": tf.cast(got["k"], tf.float32)}, "k")[:, :, 0, 0]
    np.testing.assert_array_equal(written, [[0, 0, 0, 1, 1]] * B)


# Numbers of hypotheses of a source, and which of those before each continues from.
MOVES = [
    [[0, 0, 0], [0, 0, 0]],
    [[1, 0, 1], [2, 2, 0]],
    [[2, 0, 0], [0, 1, 2]],
    [[1, 0], [1, 2]],  # fewer
    [[1, 1, 0, 0], [0, 1, 0, 1]],  # more
]


@pytest.mark.parametrize("dim", [0, 1])
def test_hypotheses_attend_as_if_each_had_a_cache_of_its_own(dim: int) -> None:
    """Copies that are moved, with a mask and a bias of each, against slots."""
    size = 2 + len(MOVES)
    kept, keys = filled(size=size)
    rng = np.random.default_rng(7)
    lead = (lambda t: tf.stack([t, t])) if dim else (lambda t: t)
    first = (lambda t: t[0]) if dim else (lambda t: t)
    for t, move in enumerate(MOVES, start=2):
        m = len(move[0])
        rows = np.concatenate([np.array(move[b]) + b * (len(keys) // B) for b in range(B)])
        moved = cache.choose(
            tf.nest.map_structure(lead, kept), tf.constant(rows, tf.int32), dim=dim
        )
        kept, keys = tf.nest.map_structure(first, moved), keys[rows]
        assert cache.num_hypotheses(kept) == m
        new = rng.standard_normal([B * m, 1, K, H]).astype(np.float32)
        kept = cache.write(kept, tf.constant(new), tf.constant(-new), t)
        keys[:, t] = new[:, 0]

        q = tf.constant(rng.standard_normal([B * m, 1, 2 * K, H]), tf.float32)
        hidden = rng.integers(0, 2, [B * m, 1, 1, size]).astype(bool)
        mask = tf.constant((np.arange(size) <= t) & (hidden | (np.arange(size) == t)))
        bias = tf.constant(rng.standard_normal([B * m, 2 * K, 1, size]), tf.float32)
        want = attend(q, tf.constant(keys), tf.constant(-keys), scale=0.7, mask=mask, bias=bias)

        grouped = tf.reshape(q, [B, m, 2 * K, H])
        own = {"mask": cache.own_mask(kept, mask), "bias": cache.own_bias(kept, bias)}
        k, v = cache.read(kept, tf.float32)
        got = attend_known(grouped, k, v, scale=0.7, **own)
        np.testing.assert_allclose(
            tf.reshape(got, want.shape), want, rtol=1e-5, atol=1e-6, err_msg=str(t)
        )
        weights = mean_probabilities(grouped, k, scale=0.7, **own)
        attention_weights = cache.of_places(kept, weights)
        heads_first = tf.transpose(tf.constant(keys), [0, 2, 1, 3])
        want = mean_probabilities(q, heads_first, scale=0.7, mask=mask, bias=bias)
        np.testing.assert_allclose(attention_weights, want, rtol=1e-5, atol=1e-6, err_msg=str(t))


def test_moving_hypotheses_moves_no_key() -> None:
    kept = cache.expand(filled()[0], 3)
    moved = cache.choose(kept, tf.constant([2, 0, 0, 3, 3, 4]))
    assert moved["k"] is kept["k"] and moved["v"] is kept["v"]


def test_hypotheses_read_one_element_at_a_time() -> None:
    kept, block = cache.expand(filled()[0], 3), tf.zeros([B * 3, 2, K, H])
    with pytest.raises(ValueError, match="3 hypotheses per row takes one element"):
        cache.write(kept, block, block, 0)
    with pytest.raises(ValueError, match="3 hypotheses per row takes one element"):
        cache.write(kept, block[:, :1], block[:, :1], tf.range(6))


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
