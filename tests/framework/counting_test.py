"""Counts with their nouns."""

from __future__ import annotations

from tekso.framework.counting import counted


def test_one_is_singular() -> None:
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert counted(2, "batch", "batches") == "2 batches"
    assert counted(2000, "step", grouping="") == "2000 steps"
