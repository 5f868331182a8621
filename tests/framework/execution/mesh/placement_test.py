"""Placement: which process has which shard of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tekso.framework.execution.mesh.placement import Placement


class Mesh:
    """The devices of a process from the number `first` on, in a mesh of the given sizes."""

    def __init__(self, sizes: dict[str, int], first: int, count: int) -> None:
        self.dim_names, self._sizes = tuple(sizes), sizes
        self._numbers = range(first, first + count)

    def dim_size(self, name: str) -> int:
        return self._sizes[name]

    def local_device_locations(self) -> list[dict[str, int]]:
        places = [np.unravel_index(n, list(self._sizes.values())) for n in self._numbers]
        return [dict(zip(self._sizes, map(int, at), strict=True)) for at in places]


def test_every_distinct_shard_names_the_processes_that_have_it() -> None:
    placement = Placement(Mesh({"data": 2, "model": 2}, first=0, count=2))
    columns = slice(0, 3)
    assert placement.shards((6, 3), ("data", None)) == [
        ((slice(0, 3), columns), (0,)),
        ((slice(3, 6), columns), (1,)),
    ]
    assert placement.shards((6, 3), ("model", None)) == [
        ((slice(0, 3), columns), (0, 1)),
        ((slice(3, 6), columns), (0, 1)),
    ]
    assert placement.shards((), ()) == [((), (0, 1))]


@pytest.mark.parametrize(
    ("sizes", "count", "extents"),
    [
        ({"data": 4}, 2, [(0, 6), (6, 12)]),
        ({"model": 2, "data": 2}, 2, [(0, 12), (0, 12)]),
        ({"data": 3, "model": 2}, 3, [(0, 8), (4, 12)]),
        # The devices of the second process have the last third and the first.
        ({"model": 2, "data": 3}, 2, [(0, 8), (0, 12), (4, 12)]),
    ],
)
def test_extent_goes_from_the_first_to_the_last_row_of_the_devices_of_a_process(
    sizes: dict[str, int], count: int, extents: list[tuple[int, int]]
) -> None:
    found = [Placement(Mesh(sizes, count * i, count)) for i in range(len(extents))]
    assert [placement.extent(12, "data") for placement in found] == extents
    assert [placement.extent(12, None) for placement in found] == [(0, 12)] * len(extents)


def test_rows_of_a_part_are_placed_where_they_are_in_the_whole_array() -> None:
    placement = Placement(Mesh({"data": 4}, first=2, count=2))
    placed: list[np.ndarray] = []

    def place(part: Any, shape: Any, axes: Any, dtype: Any) -> None:
        where = [placement.slices(shape, axes, {"data": i}) for i in (2, 3)]
        placed.extend(map(part, where))

    placement.place = place  # type: ignore[method-assign, assignment]
    whole = np.arange(2 * 8).reshape(2, 8)
    placement.put_rows(whole[:, 4:], (None, "data"), dim=1, size=8, first=4)
    np.testing.assert_array_equal(placed, [whole[:, 4:6], whole[:, 6:8]])
