"""Bytes and speed of rings, against rings whose chunks are moved one by one."""

from __future__ import annotations

import pytest

from tekso.framework.costs import device_types
from tekso.framework.planning.rings import ring


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ring_sends_what_a_ring_of_chunks_sends(n: int) -> None:
    # Every device holds n chunks; in a turn each sends one to the next, which adds or keeps it.
    size, chunk = 120.0, 120.0 / n
    held = [[{(device, c)} for c in range(n)] for device in range(n)]
    sent_by_first, iterations = 0.0, 0
    for turn in range(n - 1):  # reduce-scatter
        moving = [(d, (d - turn) % n, held[d][(d - turn) % n]) for d in range(n)]
        for d, c, values in moving:
            held[(d + 1) % n][c] = held[(d + 1) % n][c] | values
        sent_by_first, iterations = sent_by_first + chunk, iterations + 1
    assert all(held[d][(d + 1) % n] == {(e, (d + 1) % n) for e in range(n)} for d in range(n))
    assert ring("reduce-scatter", n, size) == (pytest.approx(sent_by_first), iterations)
    assert ring("all-gather", n, size) == (pytest.approx(sent_by_first), iterations)
    assert ring("all-reduce", n, size) == (pytest.approx(2 * sent_by_first), 2 * iterations)
    assert ring("all-reduce", 1, size) == (0, 0)


def test_ring_that_leaves_a_node_is_as_slow_as_the_network() -> None:
    a100 = device_types.find("a100")
    assert a100.link(8)[0] == 300e9
    assert a100.link(16)[0] == 25e9
    assert device_types.find("tpu_v2").link(512)[0] == 62e9
