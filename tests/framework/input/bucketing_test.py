"""Bucketing: every example once an epoch, in the right bucket, in any order of calls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input import packing, shuffle
from tekso.framework.input.bucketing import Buckets

KEY = shuffle.key_of(0, "buckets")
BOUNDS = [2, 5, 9]
BATCH_SIZES = [4, 3, 2]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Lets the few examples of these tests be several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", 7)
        yield


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.booleans())
def test_an_epoch_has_every_example_once_in_the_bucket_of_its_length(
    lengths: list[int], shuffled: bool
) -> None:
    buckets = Buckets(lengths, BOUNDS, BATCH_SIZES)
    seen: list[int] = []
    for number in range(buckets.num_batches):
        chosen = buckets.batch(number, key=KEY if shuffled else None)
        assert len(chosen.examples) == len(chosen.real) == BATCH_SIZES[chosen.bucket]
        shortest = BOUNDS[chosen.bucket - 1] if chosen.bucket else 0
        for example in chosen.examples.tolist():
            assert shortest < lengths[example] <= BOUNDS[chosen.bucket]
        seen += chosen.examples[chosen.real].tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_epochs_differ_and_each_is_the_same_again() -> None:
    buckets = Buckets(np.arange(60) % 9 + 1, BOUNDS, BATCH_SIZES)

    def epoch(number: int) -> list[list[int]]:
        key = shuffle.fold(KEY, number)
        return [buckets.batch(i, key=key).examples.tolist() for i in range(buckets.num_batches)]

    assert epoch(0) == epoch(0) != epoch(1)


@pytest.mark.parametrize(
    ("bounds", "sizes", "text"),
    [
        ([5, 2], [1, 1], "ascend"),
        ([], [], "ascend"),
        ([2, 9], [1], "2 batch sizes"),
        ([2, 9], [1, 0], "2 batch sizes"),
        ([2, 5], [1, 1], "longer than the last bucket"),
    ],
)
def test_buckets_that_make_no_sense_are_refused(
    bounds: list[int], sizes: list[int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Buckets([1, 7], bounds, sizes)
