"""Masks against their definitions, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tekso.models.layers import masking
from tekso.models.layers.positions import sines


@given(
    num_queries=st.integers(1, 6),
    num_keys=st.integers(1, 6),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 7),
    as_tensors=st.booleans(),
)
def test_by_position_hides_what_is_after_or_too_far(
    num_queries: int, num_keys: int, causal: bool, window: int | None, as_tensors: bool
) -> None:
    queries, keys = np.arange(num_queries) + 2, np.arange(num_keys)
    places = [tf.constant(p) for p in (queries, keys)] if as_tensors else [queries, keys]

    mask = masking.by_position(*places, causal=causal, window=window)

    if not causal and window is None:
        assert mask is None
        return
    assert mask.shape == (1, 1, num_queries, num_keys)
    assert isinstance(mask, np.ndarray) != as_tensors
    for i, q in enumerate(queries):
        for j, k in enumerate(keys):
            near = window is None or abs(int(q) - int(k)) < window
            assert bool(mask[0, 0, i, j]) == (near and not (causal and k > q))


def test_by_position_of_one_position_a_row_has_a_mask_a_row() -> None:
    queries = tf.constant([[0, 1], [3, 4], [1, 2]])

    mask = masking.by_position(queries, np.arange(5), causal=True)

    want = np.arange(5)[None, None] <= np.array(queries)[..., None]
    np.testing.assert_array_equal(mask, want[:, None])


def test_causal_is_a_lower_triangle_known_when_the_program_is_built() -> None:
    mask = masking.causal(3, 5)

    assert isinstance(mask, np.ndarray)
    np.testing.assert_array_equal(mask[0, 0], np.tril(np.ones([3, 5], bool)))
    np.testing.assert_array_equal(masking.causal(4, window=2)[0, 0].sum(1), [1, 2, 2, 2])


def test_padding_hides_keys_of_weight_zero() -> None:
    weights = np.array([[1, 1, 0], [0.5, 0, 0]], np.float32)

    for given_as in (weights, weights != 0):
        mask = masking.padding(tf.constant(given_as))
        assert mask.shape == (2, 1, 1, 3)
        np.testing.assert_array_equal(mask[:, 0, 0], weights > 0)


def test_segments_see_themselves_and_padding_sees_and_is_seen_by_none() -> None:
    ids = np.array([[1, 1, 2, 0, 0], [1, 2, 3, 3, 0]])

    mask = masking.segments(tf.constant(ids))

    want = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    np.testing.assert_array_equal(mask, want[:, None])
    other = masking.segments(tf.constant(ids), tf.constant(ids[:, :3]))
    np.testing.assert_array_equal(other, want[:, None, :, :3])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_tokens_are_what_sees_itself(as_tensor: bool) -> None:
    def given(mask: np.ndarray) -> masking.Array:
        return tf.constant(mask) if as_tensor else mask

    ids = np.array([[1, 1, 2, 0], [0, 3, 3, 3]])
    segments = np.asarray(masking.segments(tf.constant(ids)))
    np.testing.assert_array_equal(masking.tokens(given(segments), 4), ids != 0)
    hidden = np.array([True, True, False])
    padding = np.asarray(masking.padding(tf.constant([hidden])))
    np.testing.assert_array_equal(masking.tokens(given(padding), 3), [hidden])
    both = np.stack([np.eye(3, dtype=bool) & hidden, np.zeros([3, 3], bool)])  # of two heads
    np.testing.assert_array_equal(masking.tokens(given(both[None]), 3), [hidden])
    assert np.all(masking.tokens(given(np.asarray(masking.causal(3))), 3))
    assert masking.tokens(None, 3) is None


def test_combine_keeps_constants_constant_and_nothing_nothing() -> None:
    causal, ids = masking.causal(3), np.array([[1, 1, 2]])

    both = masking.combine(masking.segments(tf.constant(ids)), None, causal)

    want = (ids[:, :, None] == ids[:, None, :]) & np.tril(np.ones([3, 3], bool))
    np.testing.assert_array_equal(both[:, 0], want)
    assert masking.combine(None, None) is None
    assert isinstance(masking.combine(causal, causal[..., :1]), np.ndarray)


def test_window_that_hides_the_query_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0, must be at least 1"):
        masking.causal(3, window=0)


@pytest.mark.parametrize("window", [None, 2])
def test_a_prefix_is_seen_by_all_however_far(window: int | None) -> None:
    places = np.arange(5)
    got = masking.by_position(places, places, causal=True, window=window, prefix=2)
    for query in range(5):
        for key in range(5):
            near = key <= query and (window is None or query - key < window)
            assert got[0, 0, query, key] == (near or key < 2)

    later = masking.by_position(tf.constant([[3], [4]]), places, causal=True, prefix=2)
    np.testing.assert_array_equal(later[:, 0, 0], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    block = masking.by_position(tf.constant([0, 1]), places, causal=True, prefix=2)
    np.testing.assert_array_equal(block[0, 0], [[1, 1, 0, 0, 0]] * 2)


def test_a_large_mask_is_computed_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant of 20,000 × 20,000 positions in each layer took gigabytes while it was traced."""
    places = np.arange(5)
    forms: list[dict[str, Any]] = [
        {"causal": True}, {"causal": True, "window": 2}, {"causal": False, "window": 2},
        {"causal": True, "window": 2, "prefix": 1},
    ]  # fmt: skip
    constants = [masking.by_position(places, places, **form) for form in forms]
    is_token = masking.tokens(masking.causal(5) & (places > 1), 5)

    monkeypatch.setattr(masking, "_MOST_CONSTANT", 24)

    for form, constant in zip(forms, constants, strict=True):
        mask = masking.by_position(places, places, **form)
        assert tf.is_tensor(mask) and isinstance(constant, np.ndarray)
        np.testing.assert_array_equal(mask, constant)
    assert tf.is_tensor(masking.distances(places, places))
    np.testing.assert_array_equal(masking.tokens(masking.causal(5) & (places > 1), 5), is_token)
    np.testing.assert_array_equal(masking.tokens(np.ones([1, 1, 1, 5], bool), 5), [[True] * 5])
    assert isinstance(masking.causal(4), np.ndarray)


def test_the_graph_of_a_long_mask_is_small() -> None:
    places = np.arange(20_000, dtype=np.int32)
    function = tf.function(lambda: masking.by_position(places, places, causal=True, window=9))
    graph = function.get_concrete_function().graph.as_graph_def()
    assert graph.ByteSize() < 1_000_000


def test_distances_that_are_too_many_for_a_graph_are_an_error_before_they_are_computed() -> None:
    places = np.broadcast_to(np.int32(0), [2**16])
    with pytest.raises(ValueError, match="65,536 × 65,536, is too large for a graph"):
        masking.by_position(places, places, causal=True)
    assert masking.by_position(places, places, causal=False) is None
    with pytest.raises(ValueError, match="each position and a column for each wavelength"):
        sines(np.broadcast_to(np.int32(0), [2**26]), np.ones(32))
