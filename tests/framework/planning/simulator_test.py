"""Simulated timelines against the closed formulas of the papers, and a plain event-by-event model.

The formulas are written out here; times are whole numbers or quarters, so that sums are exact.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework.execution.pipeline.actions import Event
from tekso.framework.execution.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    WEIGHT_GRADIENT,
    Action,
    InterleavedOneFOneB,
    Kind,
    PipelineSchedule,
    ScheduleError,
    schedule_of,
)
from tekso.framework.planning.simulator import Timeline, simulate

K = st.integers(1, 8)
M = st.integers(1, 16)
TIME = st.integers(1, 9)


def timeline(
    schedule: str | PipelineSchedule,
    k: int,
    m: int,
    *,
    f: float = 1,
    b: float = 1,
    w: float = 1,
    handover: float = 0,
) -> Timeline:
    """The timeline with the same times at all stages."""
    times = {FORWARD: f, BACKWARD: b, WEIGHT_GRADIENT: w}
    chosen = schedule_of(schedule) if isinstance(schedule, str) else schedule
    return simulate(
        chosen.actions(k, m), num_devices=k, durations=lambda _, kind: times[kind],
        handover=handover,
    )  # fmt: skip


def interleaved(chunks: int) -> PipelineSchedule:
    schedule: PipelineSchedule = InterleavedOneFOneB.Params(chunks=chunks).instantiate()
    return schedule


# --- closed formulas ---


@pytest.mark.parametrize(("k", "m", "idle"), [(2, 4, 0.2000), (4, 8, 0.2727), (4, 16, 0.1579)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_the_published_one(name: str, k: int, m: int, idle: float) -> None:
    assert round(timeline(name, k, m, f=1, b=2).idle_share, 4) == idle


@given(st.sampled_from(["gpipe", "1f1b"]), K, M, TIME, TIME)
def test_gpipe_and_1f1b_are_idle_k_minus_1_of_m_plus_k_minus_1(
    name: str, k: int, m: int, f: int, b: int
) -> None:
    found = timeline(name, k, m, f=f, b=b)
    assert found.makespan == (m + k - 1) * (f + b)
    assert found.busy == (m * (f + b),) * k
    assert found.idle_share == pytest.approx((k - 1) / (m + k - 1), abs=1e-12)


@given(K, M, TIME, TIME, st.integers(0, 5))
def test_every_handover_of_gpipe_is_waited_for_twice(
    k: int, m: int, f: int, b: int, handover: int
) -> None:
    found = timeline("gpipe", k, m, f=f, b=b, handover=handover)
    # The first micro-batch goes down through all devices, the last one comes up again.
    assert found.makespan == (m + k - 1) * (f + b) + 2 * (k - 1) * handover


@given(K, M)
def test_gpipe_holds_all_and_1f1b_as_many_as_there_are_devices_below(k: int, m: int) -> None:
    assert timeline("gpipe", k, m).held == (m,) * k
    assert timeline("1f1b", k, m).held == tuple(min(m, k - rank) for rank in range(k))


@given(K, st.integers(1, 4), st.integers(1, 4), TIME, TIME)
def test_interleaved_divides_the_idle_time_by_the_chunks(
    k: int, groups: int, v: int, f: int, b: int
) -> None:
    m = groups * k
    found = timeline(interleaved(v), k, m, f=f, b=b)  # times of a chunk
    ideal = m * v * (f + b)
    assert (found.makespan - ideal) * v * m == (k - 1) * ideal
    first = min(Fraction(m), k * (1 + Fraction(k - 1, k * v)))
    assert found.held[0] == pytest.approx(float(first))
    assert list(found.held) == sorted(found.held, reverse=True)


@given(K, st.integers(0, 12), TIME, TIME, TIME)
def test_zero_bubble_h1_is_idle_f_plus_b_minus_w_a_device(
    k: int, more: int, f: int, b: int, w: int
) -> None:
    w = min(f, b, w)
    m = k + more
    found = timeline("zero_bubble_h1", k, m, f=f, b=b, w=w)
    assert found.makespan == m * (f + b + w) + (k - 1) * (f + b - w)
    assert found.held == (k,) * k


@given(K, st.integers(0, 12))
def test_zero_bubble_h1_has_a_third_of_the_bubble_of_1f1b_if_all_times_are_equal(
    k: int, more: int
) -> None:
    m = k + more
    ideal = 3 * m
    zero = timeline("zero_bubble_h1", k, m).makespan - ideal
    one = timeline("1f1b", k, m, b=2).makespan - ideal
    assert 3 * zero == one


@given(K, M, TIME, TIME, TIME)
def test_zero_bubble_h1_is_never_slower_than_1f1b_and_never_holds_more_than_k(
    k: int, m: int, f: int, b: int, w: int
) -> None:
    zero = timeline("zero_bubble_h1", k, m, f=f, b=b, w=w)
    assert zero.makespan <= timeline("1f1b", k, m, f=f, b=b + w).makespan
    assert zero.held == (min(k, m),) * k


# --- any durations ---


@settings(max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 4),
       st.integers(0, 8), st.integers(0, 2**32 - 1))  # fmt: skip
def test_timeline_is_the_one_that_an_event_by_event_model_finds(
    name: str, k: int, groups: int, handover: int, seed: int
) -> None:
    schedule = schedule_of(name)
    stages, m = schedule.num_stages(k), k * groups
    drawn = np.random.default_rng(seed).integers(0, 7, (stages, 3)) / 4
    kinds: tuple[Kind, ...] = (FORWARD, BACKWARD, WEIGHT_GRADIENT)
    times = {(s, kind): float(drawn[s, i]) for s in range(stages) for i, kind in enumerate(kinds)}
    actions = list(schedule.actions(k, m))
    found = simulate(actions, num_devices=k, durations=times, handover=handover / 4)
    want = _relaxed(actions, k, stages, times, handover / 4)
    assert {event.action: (event.start, event.end) for event in found.events} == want
    assert found.makespan == max(end for _, end in want.values()) - found.start


def _relaxed(
    actions: list[Action],
    k: int,
    stages: int,
    times: dict[tuple[int, Kind], float],
    handover: float,
) -> dict[Action, tuple[float, float]]:
    """All starts at 0, and put later until no rule is broken: slow, and short."""
    place = {(a.kind, a.stage, a.micro_batch): a for a in actions}
    rules: list[tuple[Action, Action, float]] = []  # after, before, and the time between
    for d in range(k):
        mine = sorted((a for a in actions if a.device == d), key=lambda a: a.tick)
        rules += [(after, before, 0.0) for before, after in itertools.pairwise(mine)]
    for (kind, s, m), after in place.items():
        wants = {
            FORWARD: [(FORWARD, s - 1, m)],
            BACKWARD: [(FORWARD, s, m), (BACKWARD, s + 1, m)],
            WEIGHT_GRADIENT: [(BACKWARD, s, m)],
        }[kind]
        for want in wants:
            if 0 <= want[1] < stages:
                before = place[want]
                rules.append((after, before, handover if before.device != after.device else 0.0))
    start = dict.fromkeys(actions, 0.0)
    is_changed = True
    while is_changed:
        is_changed = False
        for after, before, between in rules:
            earliest = start[before] + times[before.stage, before.kind] + between
            if start[after] < earliest:
                start[after], is_changed = earliest, True
    return {a: (t, t + times[a.stage, a.kind]) for a, t in start.items()}


def test_durations_may_be_a_mapping_and_differ_by_stage() -> None:
    slow = {(0, FORWARD): 1.0, (1, FORWARD): 3.0, (0, BACKWARD): 2.0, (1, BACKWARD): 5.0}
    found = simulate(schedule_of("gpipe").actions(2, 2), num_devices=2, durations=slow)
    # Device 1 from 1 on: two forwards, two backwards; then the last backward of device 0.
    assert found.makespan == 1 + 2 * 3 + 2 * 5 + 2
    assert found.busy == (2 * 3.0, 2 * 8.0)
    assert found.idle_share == pytest.approx(1 - 22 / (2 * 19))


def test_wrong_durations_are_refused() -> None:
    actions = list(schedule_of("gpipe").actions(2, 2))
    with pytest.raises(
        ScheduleError, match="no duration for backward at stage 1; there are durations for: "
    ):
        simulate(actions, num_devices=2, durations={
            (0, FORWARD): 1.0, (1, FORWARD): 1.0, (0, BACKWARD): 1.0})  # fmt: skip
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ScheduleError, match="duration of backward at stage 0 is"):
            simulate(actions, num_devices=2, durations=lambda *_, wrong=wrong: wrong)
    with pytest.raises(ScheduleError, match="handover is -1, but must"):
        simulate(actions, num_devices=2, durations=lambda *_: 1.0, handover=-1)


def test_schedule_that_does_not_work_is_refused() -> None:
    backward_first = [Action(0, 0, 0, 0, BACKWARD), Action(0, 1, 0, 0, FORWARD)]
    with pytest.raises(ScheduleError, match="stuck, no device can continue"):
        simulate(backward_first, num_devices=1, durations=lambda *_: 1.0)
    with pytest.raises(ScheduleError, match="the devices are numbered 0 to 0, and 1 is not"):
        simulate(schedule_of("gpipe").actions(2, 2), num_devices=1, durations=lambda *_: 1.0)


# --- what a timeline shows ---


def test_measured_timeline_may_start_at_any_time() -> None:
    events = (
        Event(Action(0, 0, 0, 0, FORWARD), 100.0, 101.0),
        Event(Action(1, 1, 1, 0, FORWARD), 101.5, 103.0),
        Event(Action(1, 2, 1, 0, BACKWARD), 103.0, 104.0),
        Event(Action(0, 3, 0, 0, BACKWARD), 104.0, 108.0),
    )
    found = Timeline(events, num_devices=2, num_stages=2)
    assert (found.start, found.makespan, found.busy) == (100.0, 8.0, (5.0, 2.5))
    assert found.idle_share == pytest.approx(1 - 7.5 / 16)
    assert found.held == (1, 1)


def test_micro_batch_is_held_until_its_weight_gradient_where_there_is_one() -> None:
    works = [(0, FORWARD), (0, BACKWARD), (1, FORWARD), (1, BACKWARD)]
    actions = [Action(0, t, 0, m, kind) for t, (m, kind) in enumerate(works)]
    late = [Action(0, 4 + m, 0, m, WEIGHT_GRADIENT) for m in (0, 1)]
    one = simulate(actions, num_devices=1, durations=lambda *_: 1.0)
    two = simulate([*actions, *late], num_devices=1, durations=lambda *_: 1.0)
    assert (one.held, two.held) == ((1,), (2,))


def test_timeline_of_nothing_is_empty() -> None:
    found = simulate([], num_devices=2, durations={})
    assert (found.makespan, found.busy, found.idle_share, found.held) == (0, (0, 0), 0, (0, 0))


def test_work_of_a_simulation_grows_like_the_actions() -> None:
    def lines(devices: int, micro_batches: int) -> float:
        """Lines of Python that one action takes."""
        actions = list(schedule_of("1f1b").actions(devices, micro_batches))
        found = []
        number = lines_of(lambda: found.append(simulate(
            actions, num_devices=devices, durations=lambda *_: 1.0)))  # fmt: skip
        assert found[0].makespan == 2 * (micro_batches + devices - 1)
        return number / len(actions)

    small, large = lines(4, 16), lines(16, 64)
    # What looks at all devices or all actions again for each would take 4 or 16 times as many.
    assert small > 5 and large < 1.5 * small


def test_large_schedule_has_the_timeline_of_the_formula() -> None:
    actions = schedule_of("1f1b").actions(128, 512)
    found = simulate(actions, num_devices=128, durations=lambda *_: 1.0)
    assert found.makespan == 2 * (512 + 127) and found.held == tuple(range(128, 0, -1))


def lines_of(function: Callable[[], object]) -> int:
    """Counts the lines of Python that a function executes: the same on every machine."""
    number, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal number
        number += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return number
