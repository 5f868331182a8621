"""A fixed piece of work shows whether the machine is faster, slower or busier than before."""

from __future__ import annotations

import numpy as np
import pytest

from tekso.framework.costs import reference_work
from tekso.framework.costs.reference_work import Reference

IDLE, BUSY = Reference(1.0, 1.1), Reference(1.0, 2.2)


def test_time_is_that_of_the_slowest_core_and_cpu_time_the_least() -> None:
    times = np.zeros([2, 3, 3])  # [core, repetition, (start, end, CPU time)]
    times[0] = [(0.0, 4.0, 3.0), (5.0, 7.0, 2.0), (9.0, 12.0, 2.0)]
    times[1] = [(1.0, 9.0, 3.0), (5.0, 8.0, 4.0), (10.0, 11.0, 1.0)]
    assert reference_work.of_times(times) == Reference(cpu_s=1.5, seconds=3.0)


def test_an_idle_machine_is_neither_busy_nor_slow_and_its_speeds_are_kept() -> None:
    again = Reference(0.9, 1.15)
    assert not again.is_busy and not again.is_slower(IDLE)
    assert again.reason_to_repeat(IDLE) == "" and IDLE.reason_to_repeat(again) == ""


def test_speeds_are_measured_again_if_the_machine_is_faster_or_no_longer_busy() -> None:
    assert "it is 1.5 times as fast now" in Reference(1.0, 1.1).reason_to_repeat(
        Reference(1.5, 1.6)
    )
    assert "it is idle now" in IDLE.reason_to_repeat(BUSY)
    assert BUSY.reason_to_repeat(BUSY) == ""  # it would be no better
    assert BUSY.reason_to_repeat(IDLE) == ""
    assert Reference(2.0, 2.2).reason_to_repeat(IDLE) == ""


def test_other_programs_or_a_slower_processor_make_a_machine_slower() -> None:
    assert BUSY.is_slower(IDLE) and BUSY.slowdown(IDLE) == pytest.approx(2.2)
    slow = Reference(2.0, 2.2)
    assert slow.is_slower(IDLE) and not slow.is_busy


def test_measurements_together_are_the_fastest_and_the_busiest() -> None:
    assert reference_work.together([IDLE, Reference(0.8, 3.0), BUSY]) == Reference(0.8, 3.0)


def test_the_work_takes_time() -> None:
    found = reference_work.measure()
    assert found.cpu_s > 0.0 and found.seconds > 0.0
