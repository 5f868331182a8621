"""Placement: which process has which shard of a tensor."""

from __future__ import annotations

from tekso.framework.execution.mesh.placement import Placement


class FourDevices:
    """A mesh data:2;model:2 of two processes with two devices each, as process 0 sees it."""

    dim_names = ("data", "model")

    def dim_size(self, name: str) -> int:
        return 2

    def local_device_locations(self) -> list[dict[str, int]]:
        return [{"data": 0, "model": 0}, {"data": 0, "model": 1}]


def test_every_distinct_shard_names_the_processes_that_have_it() -> None:
    placement = Placement(FourDevices())
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
