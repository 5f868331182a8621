"""Packing: everything once, nothing too long, few rows."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input import packing, shuffle
from tekso.framework.input.packing import Packing, pack, pack_in_order, pack_sides

KEY = shuffle.key_of(0, "packing")
SideProblem = tuple[tuple[np.ndarray, np.ndarray], tuple[int, int]]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Lets the few examples of these tests be several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", 16)
        yield


def rows_of(lengths: list[int], capacity: int) -> list[list[int]]:
    packed = pack(lengths, capacity, key=KEY)
    return [packed.row(row).tolist() for row in range(packed.num_rows)]


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
    packed = pack(lengths, 128, key=KEY)
    assert lengths.sum() / (packed.num_rows * 128) > 0.999


def test_the_key_decides_which_examples_of_equal_length_meet() -> None:
    one = pack([2] * 50, 4, key=shuffle.key_of(0, "packing")).examples.tolist()
    two = pack([2] * 50, 4, key=shuffle.key_of(1, "packing")).examples.tolist()
    again = pack([2] * 50, 4, key=shuffle.key_of(0, "packing")).examples.tolist()
    assert one == again != two


@pytest.mark.parametrize("lengths", [[0], [3, 6]])
def test_a_length_that_no_row_can_have_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not all fit"):
        pack(lengths, 5, key=KEY)


@st.composite
def side_problems(draw: st.DrawFn) -> SideProblem:
    capacities = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    pair = st.tuples(*(st.integers(1, capacity) for capacity in capacities))
    pairs = np.array(draw(st.lists(pair, min_size=1, max_size=60)), np.int64)
    return (pairs[:, 0], pairs[:, 1]), capacities


def check_sides(
    packed: Packing, lengths: tuple[np.ndarray, np.ndarray], capacities: tuple[int, int]
) -> None:
    rows = [packed.row(row).tolist() for row in range(packed.num_rows)]
    assert sorted(pair for row in rows for pair in row) == list(range(len(lengths[0])))
    for row in rows:
        assert row
        for side, capacity in zip(lengths, capacities, strict=True):
            assert side[row].sum() <= capacity


@given(side_problems())
def test_every_example_lies_in_one_row_and_all_its_sides_fit(problem: SideProblem) -> None:
    check_sides(pack_sides(*problem, key=KEY), *problem)


@given(side_problems())
def test_in_order_every_row_takes_what_fits(problem: SideProblem) -> None:
    packed = pack_in_order(*problem)
    check_sides(packed, *problem)
    assert packed.examples.tolist() == list(range(len(problem[0][0])))
    for row in range(packed.num_rows - 1):
        more = [*packed.row(row), packed.row(row + 1)[0]]
        assert any(side[more].sum() > capacity for side, capacity in zip(*problem, strict=True))


@pytest.mark.parametrize("capacities", [(128, 128), (96, 128)])
def test_rows_of_sentences_are_full(capacities: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    source = np.clip(random.lognormal(3.0, 0.6, 20_000), 2, 90).astype(np.int64)
    target = np.clip(source * random.lognormal(0.0, 0.25, 20_000), 2, 96).astype(np.int64)
    packed = pack_sides((source, target), capacities, key=KEY)
    check_sides(packed, (source, target), capacities)
    fewest = max(
        side.sum() / capacity for side, capacity in zip((source, target), capacities, strict=True)
    )
    assert fewest / packed.num_rows > 0.9


@given(problems())
def test_one_side_is_packed_as_if_it_had_no_others(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    alone = pack(lengths, capacity, key=KEY)
    packed = pack_sides([np.array(lengths, np.int64)], [capacity], key=KEY)
    np.testing.assert_array_equal(packed.examples, alone.examples)
    np.testing.assert_array_equal(packed.row_starts, alone.row_starts)


def test_packing_does_not_change_between_versions() -> None:
    lengths = np.arange(1000) * 7919 % 127 + 1
    packed = pack(lengths, 128, key=KEY)
    numbers = [part.astype("<i8").tobytes() for part in (packed.examples, packed.row_starts)]
    assert hashlib.sha256(b"".join(numbers)).hexdigest()[:16] == "841d576cb2351698"


def test_packing_takes_little_memory_for_each_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BLOCK", 4096)
    lengths = np.arange(200_000, dtype=np.int32) * 7919 % 50 + 5
    tracemalloc.start()
    pack_sides([lengths], [512], key=KEY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 8 <= peak / len(lengths) < 12  # two int32: sorted by length, and by row
