"""Packing and cutting: everything once, nothing too long, few rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input import shuffle
from tekso.framework.input.packing import cut, pack

KEY = shuffle.key_of(0, "packing")


def rows_of(lengths: list[int], capacity: int) -> list[list[int]]:
    packing = pack(lengths, capacity, key=KEY)
    return [packing.row(row).tolist() for row in range(packing.num_rows)]


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """Number of rows of the rule, one example after the other."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(free) if room >= length]
        if fitting:
            free[min(fitting, key=lambda row: free[row])] -= length
        else:
            free.append(capacity - length)
    return len(free)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 20))
    return draw(st.lists(st.integers(1, capacity), max_size=60)), capacity


@given(problems())
def test_every_example_lies_in_one_row_and_rows_hold_them(
    problem: tuple[list[int], int],
) -> None:
    lengths, capacity = problem
    rows = rows_of(lengths, capacity)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[example] for example in row) <= capacity for row in rows)


@given(problems())
def test_rows_are_as_few_as_best_fit_decreasing_makes(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    # By kinds of rows instead of single ones, ties are broken otherwise: a row more at most.
    assert abs(len(rows_of(lengths, capacity)) - best_fit_decreasing(lengths, capacity)) <= 1


def test_a_known_case_leaves_no_gap() -> None:
    assert sorted(map(len, rows_of([5, 4, 3, 2, 2, 2], 9))) == [2, 4]


def test_many_short_examples_are_packed_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 10_000)
    packing = pack(lengths, 128, key=KEY)
    assert lengths.sum() / (packing.num_rows * 128) > 0.999


def test_the_key_decides_which_examples_of_equal_length_meet() -> None:
    one = pack([2] * 50, 4, key=shuffle.key_of(0, "packing")).examples.tolist()
    two = pack([2] * 50, 4, key=shuffle.key_of(1, "packing")).examples.tolist()
    again = pack([2] * 50, 4, key=shuffle.key_of(0, "packing")).examples.tolist()
    assert one == again != two


@pytest.mark.parametrize("lengths", [[0], [3, 6]])
def test_a_length_that_no_row_can_have_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not all fit"):
        pack(lengths, 5, key=KEY)


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 5))
def test_pieces_cover_every_sequence_once_in_order(lengths: list[int], longest: int) -> None:
    starts = np.cumsum([0, *lengths])[:-1] + 100
    pieces = cut(starts, lengths, longest)
    covered = [
        place
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
        for place in range(start, start + length)
    ]
    assert covered == list(range(100, 100 + sum(lengths)))
    assert all(1 <= length <= longest for length in pieces.lengths.tolist())
    whole = [-(-length // longest) for length in lengths]
    assert len(pieces.starts) == sum(whole)
