"""Schedules: orders written out, closed formulas of their ticks, and how one is chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.actions import needs
from tekso.framework.execution.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    WEIGHT_GRADIENT,
    Action,
    Gpipe,
    InterleavedOneFOneB,
    OneFOneB,
    PipelineSchedule,
    ScheduleError,
    Work,
    ZeroBubbleH1,
    schedule_of,
)
from tekso.framework.execution.pipeline.schedule_check import check
from tekso.framework.params import Configurable, param

K = st.integers(1, 7)
M = st.integers(1, 12)


class Swapped(PipelineSchedule):
    """A schedule of a user's own: as GPipe, and the backwards go from the last to the first."""

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        for m in range(num_micro_batches):
            yield Work(device, m, FORWARD)
        for m in reversed(range(num_micro_batches)):
            yield Work(device, m, BACKWARD)


class Holder(Configurable):
    """Has a schedule as an execution has it."""

    class Params(Configurable.Params):
        schedule: str | PipelineSchedule.Params = param("Schedule.", default="gpipe")


def row(schedule: PipelineSchedule, device: int, num_devices: int, num_micro_batches: int) -> str:
    """What a device does: digits forward, letters backward, capitals weight gradients."""
    marks = {FORWARD: "0123456789", BACKWARD: "abcdefghij", WEIGHT_GRADIENT: "ABCDEFGHIJ"}
    mine = {
        a.tick: marks[a.kind][a.micro_batch]
        for a in schedule.actions(num_devices, num_micro_batches)
        if a.device == device
    }
    return "".join(mine.get(tick, "·") for tick in range(max(mine) + 1))


# --- orders ---


def test_first_and_last_of_four_devices_do_what_is_drawn() -> None:
    assert row(schedule_of("gpipe"), 0, 4, 4) == "0123······abcd"
    assert row(schedule_of("gpipe"), 3, 4, 4) == "···0123abcd"
    assert row(schedule_of("1f1b"), 0, 4, 6) == "0123···a4b5c·d·e·f"
    assert row(schedule_of("1f1b"), 3, 4, 6) == "···0a1b2c3d4e5f"
    assert row(schedule_of("zero_bubble_h1"), 0, 4, 6) == "0123···aA4bB5cCdDeEfF"
    assert row(schedule_of("zero_bubble_h1"), 3, 4, 6) == "···0a1b2c3dA4eB5fCDEF"


def test_interleaved_order_sends_groups_through_the_chunks_as_megatron_does() -> None:
    # Of 2 devices with 2 chunks the first goes through stages 0 and 2. Its warm-up is
    # (chunks-1)*devices + 2*(devices-1) = 4 forwards, and then one forward goes with one backward.
    works = list(InterleavedOneFOneB.Params().instantiate().order(0, 2, 4))
    forwards = [(w.stage, w.micro_batch) for w in works if w.kind == FORWARD]
    backwards = [(w.stage, w.micro_batch) for w in works if w.kind == BACKWARD]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert backwards == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]
    assert "".join(w.kind[0] for w in works) == "ffff" + "fb" * 4 + "bbbb"


@given(K, M)
def test_gpipe_does_the_pair_k_minus_j_and_j_at_tick_k(k: int, m: int) -> None:
    actions = list(Gpipe.Params().instantiate().actions(k, m))
    half = m + k - 1  # ticks forwards, and as many backwards
    for a in actions:
        if a.kind == FORWARD:
            assert a.tick == a.stage + a.micro_batch
        else:
            assert a.tick == half + (k - 1 - a.stage) + a.micro_batch
    assert 1 + max(a.tick for a in actions) == 2 * half


@given(K, M)
def test_1f1b_has_its_closed_form(k: int, m: int) -> None:
    for a in OneFOneB.Params().instantiate().actions(k, m):
        if a.kind == BACKWARD:
            assert a.tick == 2 * a.micro_batch + 2 * k - 1 - a.stage
        elif a.micro_batch < k - a.stage:
            assert a.tick == a.stage + a.micro_batch
        else:
            assert a.tick == a.stage + 2 * a.micro_batch


@given(st.sampled_from(sorted(SCHEDULES)), K, M)
def test_every_schedule_works_for_all_sizes(name: str, k: int, m: int) -> None:
    schedule = schedule_of(name)
    m = m * k if name == "interleaved_1f1b" else m
    actions = list(schedule.actions(k, m))
    stages = schedule.num_stages(k)
    check(actions, num_devices=k, num_stages=stages, num_micro_batches=m)
    assert len(actions) == stages * m * (3 if name == "zero_bubble_h1" else 2)
    ticks = {a.work: a.tick for a in actions}
    assert all(ticks[n] < a.tick for a in actions for n in needs(a.work, stages))
    assert actions == sorted(actions, key=lambda a: (a.tick, a.device))


@given(K, st.integers(1, 4), st.integers(1, 4))
def test_interleaved_works_for_any_number_of_chunks(k: int, groups: int, chunks: int) -> None:
    schedule = InterleavedOneFOneB.Params(chunks=chunks).instantiate()
    assert schedule.num_stages(k) == chunks * k
    check(
        schedule.actions(k, groups * k),
        num_devices=k,
        num_stages=chunks * k,
        num_micro_batches=groups * k,
    )


def test_interleaved_refuses_micro_batches_that_do_not_divide() -> None:
    schedule = schedule_of("interleaved_1f1b")
    with pytest.raises(ValueError) as caught:
        schedule.actions(4, 6)
    assert str(caught.value) == (
        "interleaved_1f1b: 6 micro-batches do not divide evenly over 4 devices; the nearest "
        "numbers that do: 4 or 8. 1f1b supports any number"
    )
    with pytest.raises(ScheduleError, match=r"do: 4\. 1f1b"):
        schedule.actions(4, 3)
    with pytest.raises(ScheduleError, match="chunks is 0, expected at least 1"):
        InterleavedOneFOneB.Params(chunks=0).instantiate().num_stages(4)


# --- which schedule ---


def test_schedule_is_found_by_name_or_by_params() -> None:
    classes = [Gpipe, OneFOneB, InterleavedOneFOneB, ZeroBubbleH1]
    names = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1"]
    assert [type(schedule_of(name)) for name in names] == classes
    assert type(schedule_of(" 1f1b ")) is OneFOneB
    assert schedule_of(InterleavedOneFOneB.Params(chunks=3)).num_stages(5) == 15
    assert type(schedule_of(Swapped.Params())) is Swapped


def test_unknown_name_is_refused_with_what_is_allowed_and_what_was_meant() -> None:
    with pytest.raises(ExecutionError) as caught:
        schedule_of("1F1B-interleaved")
    assert str(caught.value).startswith(
        "execution.schedule is '1F1B-interleaved', expected one of gpipe, 1f1b, interleaved_1f1b, "
        "zero_bubble_h1, or the Params of a custom PipelineSchedule"
    )
    for typed, meant in [("Gpip", "gpipe"), ("1F1B", "1f1b"), ("zero-bubble", "zero_bubble_h1")]:
        with pytest.raises(ScheduleError, match=rf"; did you mean {meant}\?$"):
            schedule_of(typed)
    with pytest.raises(ScheduleError, match=r"PipelineSchedule$"):
        schedule_of("x")


def test_param_takes_a_name_or_a_class_from_the_command_line() -> None:
    p = Holder.Params()
    p.set_text("schedule", "1f1b")
    assert type(schedule_of(p.schedule)) is OneFOneB
    p.set_text("schedule", "InterleavedOneFOneB")
    p.set_text("schedule.chunks", "4")
    assert schedule_of(p.schedule).num_stages(2) == 8
    p.schedule = Swapped.Params()
    assert schedule_of(p.schedule).num_stages(2) == 2


def test_own_schedule_needs_no_more_than_an_order() -> None:
    schedule = schedule_of(Swapped.Params())
    assert [row(schedule, d, 2, 3) for d in (0, 1)] == ["012··cba", "·012cba"]
    check(schedule.actions(2, 3), num_devices=2, num_stages=2, num_micro_batches=3)


def test_own_schedule_may_give_its_ticks_itself() -> None:
    class Timed(PipelineSchedule):
        def actions(self, num_devices: int, num_micro_batches: int) -> Iterator[Action]:
            return iter([Action(0, 5, 0, 0, BACKWARD), Action(0, 2, 0, 0, FORWARD)])

    actions = schedule_of(Timed.Params()).actions(1, 1)
    check(actions, num_devices=1, num_stages=1, num_micro_batches=1)


def test_own_schedule_without_anything_is_refused() -> None:
    class Empty(PipelineSchedule):
        pass

    with pytest.raises(ScheduleError, match=r"Empty overrides neither order\(\) nor actions\(\)"):
        list(schedule_of(Empty.Params()).actions(1, 1))
