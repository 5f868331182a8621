"""The index over several parts: every record in order, and empty parts have none."""

from __future__ import annotations

import pytest

from tekso.framework.input.joined import JoinedIndex


@pytest.mark.parametrize("sizes", [[3], [2, 1, 4], [0, 2, 0, 0, 3, 0], [0], []])
def test_places_are_those_of_the_parts_in_order(sizes: list[int]) -> None:
    index = JoinedIndex(sizes)
    wanted = [(part, within) for part, size in enumerate(sizes) for within in range(size)]
    assert len(index) == len(wanted)
    assert [index.place(number) for number in range(len(index))] == wanted
