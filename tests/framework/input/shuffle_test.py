"""Shuffling by index: permutations, without gaps, different by key, the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input import shuffle

GOLDEN = [5, 1, 8, 0, 7, 2, 6, 4, 3, 9]  # of seed 42, epoch 3, 10 elements
SEEDS = st.integers(-(2**63), 2**64)


@given(st.integers(1, 3000), SEEDS)
def test_permute_hits_every_place_once(size: int, seed: int) -> None:
    places = shuffle.permute(np.arange(size), size, shuffle.key_of(seed, "order"))
    assert sorted(places.tolist()) == list(range(size))


@given(st.integers(1, 3000), SEEDS)
def test_permute_back_undoes_permute(size: int, seed: int) -> None:
    key, index = shuffle.key_of(seed, "order"), np.arange(size)
    places = shuffle.permute(index, size, key)
    assert shuffle.permute_back(places, size, key).tolist() == index.tolist()


@given(st.integers(1, 2**40), st.integers(0, 2**40), SEEDS)
def test_permute_stays_in_range_for_large_sizes(size: int, index: int, seed: int) -> None:
    place = shuffle.permute(index % size, size, shuffle.key_of(seed, "order"))
    assert 0 <= place[0] < size


def test_an_index_goes_to_the_same_place_alone_and_among_others() -> None:
    key = shuffle.key_of(7, "order")
    whole = shuffle.permute(np.arange(1000), 1000, key)
    alone = [int(shuffle.permute(i, 1000, key)[0]) for i in range(0, 1000, 37)]
    assert alone == whole[::37].tolist()


def test_a_key_for_each_index_acts_as_the_keys_one_by_one() -> None:
    keys = shuffle.fold(shuffle.key_of(7, "order"), np.arange(4))
    index = np.array([3, 3, 5, 10])
    together = shuffle.permute(index, 11, keys)
    apart = [shuffle.permute(i, 11, keys[n : n + 1])[0] for n, i in enumerate(index)]
    assert together.tolist() == apart


@pytest.mark.parametrize("size", [2, 3, 5, 17])
def test_every_element_goes_everywhere_about_equally_often(size: int) -> None:
    rounds = 4000
    counts = np.zeros((size, size))
    for seed in range(rounds // 10):
        keys = shuffle.fold(shuffle.key_of(seed, "order"), np.arange(10))
        for key in keys:
            places = shuffle.permute(np.arange(size), size, key[None])
            counts[np.arange(size), places] += 1
    expected = rounds / size
    # 6 standard deviations of a binomial count.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected * (1 - 1 / size))


def test_neighbours_are_scattered() -> None:
    places = shuffle.permute(np.arange(10_000), 10_000, shuffle.key_of(1, "order"))
    # The distance of two uniform places has the mean size / 3.
    assert abs(np.abs(np.diff(places)).mean() - 10_000 / 3) < 100


def test_streams_of_one_seed_and_seeds_of_one_stream_differ() -> None:
    keys = {int(shuffle.key_of(seed, name)[0]) for seed in (0, 1, -1, 2**64) for name in ("a", "b")}
    assert len(keys) == 8


def test_the_order_never_changes_between_versions() -> None:
    # A run that is resumed with a later version continues in the order in which it began.
    places = shuffle.permute(np.arange(10), 10, shuffle.fold(shuffle.key_of(42, "order"), 3))
    assert places.tolist() == GOLDEN


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0)])
def test_an_index_out_of_range_is_refused(index: int, size: int) -> None:
    with pytest.raises(IndexError, match="has no index"):
        shuffle.permute(index, size, shuffle.key_of(0, "order"))
