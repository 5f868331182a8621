"""Packing of pairs: each in one row, both sides fit, rows are few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input import shuffle
from tekso.framework.input.packing import Packing
from tekso.tasks.mt.pair_packing import pack_in_order, pack_pairs

KEY = shuffle.key_of(0, "packing")
Problem = tuple[tuple[np.ndarray, np.ndarray], tuple[int, int]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    capacities = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    pair = st.tuples(*(st.integers(1, capacity) for capacity in capacities))
    pairs = np.array(draw(st.lists(pair, min_size=1, max_size=60)), np.int64)
    return (pairs[:, 0], pairs[:, 1]), capacities


def check(
    packing: Packing, lengths: tuple[np.ndarray, np.ndarray], capacities: tuple[int, int]
) -> None:
    rows = [packing.row(row).tolist() for row in range(packing.num_rows)]
    assert sorted(pair for row in rows for pair in row) == list(range(len(lengths[0])))
    for row in rows:
        assert row
        for side, capacity in zip(lengths, capacities, strict=True):
            assert side[row].sum() <= capacity


@given(problems())
def test_every_pair_lies_in_one_row_and_both_sides_fit(problem: Problem) -> None:
    check(pack_pairs(*problem, key=KEY), *problem)


@given(problems())
def test_in_order_every_row_takes_what_fits(problem: Problem) -> None:
    packing = pack_in_order(*problem)
    check(packing, *problem)
    assert packing.examples.tolist() == list(range(len(problem[0][0])))
    for row in range(packing.num_rows - 1):
        more = [*packing.row(row), packing.row(row + 1)[0]]
        assert any(side[more].sum() > capacity for side, capacity in zip(*problem, strict=True))


@pytest.mark.parametrize("capacities", [(128, 128), (96, 128)])
def test_rows_of_sentences_are_full(capacities: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    source = np.clip(random.lognormal(3.0, 0.6, 20_000), 2, 90).astype(np.int64)
    target = np.clip(source * random.lognormal(0.0, 0.25, 20_000), 2, 96).astype(np.int64)
    packing = pack_pairs((source, target), capacities, key=KEY)
    check(packing, (source, target), capacities)
    fewest = max(
        side.sum() / capacity for side, capacity in zip((source, target), capacities, strict=True)
    )
    assert fewest / packing.num_rows > 0.9
