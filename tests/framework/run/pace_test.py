"""The pace of training: units per second, the share of waiting, no pauses."""

from __future__ import annotations

import pytest

from tekso.framework.run.pace import Pace, Reading


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pace_counts_waiting_and_leaves_pauses_out() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.read() is None
    for _ in range(4):
        with pace.waiting():
            clock.now += 0.5
        clock.now += 1.5
        pace.step(300)
    with pace.paused("evaluation"):
        clock.now += 50.0
    reading = pace.read()
    assert reading == Reading(units_per_s=150.0, wait_share=0.25, seconds_per_step=2.0)
    clock.now += 1.0
    pace.step(300)
    reading = pace.read()
    assert reading is not None and reading.seconds_per_step == pytest.approx(0.8 * 2.0 + 0.2 * 1.0)
