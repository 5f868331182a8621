"""The cut whose most expensive stage costs least, against all cuts that there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.partition import balance, largest, min_max

COSTS = st.lists(st.one_of(st.integers(0, 20), st.floats(0, 1e6)), min_size=1, max_size=9)


def all_cuts(num_pieces: int, num_stages: int) -> list[list[int]]:
    inner = itertools.combinations(range(1, num_pieces), num_stages - 1)
    return [
        [end - start for start, end in itertools.pairwise((0, *cuts, num_pieces))] for cuts in inner
    ]


@given(COSTS, st.data())
def test_no_cut_has_a_cheaper_most_expensive_stage(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = min_max(costs, num_stages)
    assert found in all_cuts(len(costs), num_stages)
    best = min(largest(costs, sizes) for sizes in all_cuts(len(costs), num_stages))
    assert largest(costs, found) == pytest.approx(best, rel=1e-8, abs=0)


def test_greedy_would_leave_a_stage_empty() -> None:
    assert min_max([1, 1, 10, 1], 4) == [1, 1, 1, 1]
    assert min_max([1, 1, 10, 1], 3) == [2, 1, 1]


def test_a_task_of_one_piece_is_an_error_that_asks_for_more() -> None:
    with pytest.raises(ExecutionError, match=r"define pieces\(\) .*pipelines\.md.* at most 1$"):
        balance(["loss"], [1.0], num_stages=2, given=None, num_devices=2, most_devices=1)
