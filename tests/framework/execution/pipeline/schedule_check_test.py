"""Every way in which a schedule of one's own can be wrong is refused by its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    Work,
)
from tekso.framework.execution.pipeline.schedule import SCHEDULES, PipelineSchedule, schedule_of
from tekso.framework.execution.pipeline.schedule_check import check, checked_actions
from tekso.framework.execution.pipeline.timing import StuckError, timed

K, M = 2, 3
OF = "the schedule does not work for 2 devices, 2 stages, 3 micro-batches:\n  "


def actions_of(name: str) -> list[Action]:
    return list(schedule_of(name).actions(K, M))


def message(actions: list[Action]) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(actions, num_devices=K, num_stages=K, num_micro_batches=M)
    return str(caught.value)


def at(actions: list[Action], *work: object) -> int:
    """The index of the action that does (stage, micro_batch, kind)."""
    return next(i for i, action in enumerate(actions) if action.work == work)


def test_error_is_one_of_the_execution_and_a_value_error() -> None:
    assert issubclass(ScheduleError, ExecutionError) and issubclass(StuckError, ScheduleError)
    assert issubclass(ScheduleError, ValueError)


def test_missing_work_is_named() -> None:
    actions = actions_of("gpipe")
    del actions[at(actions, 0, 2, BACKWARD)]
    assert message(actions) == OF + "backward of micro-batch 2 at stage 0 is missing"


def test_only_some_of_many_problems_are_listed() -> None:
    text = message([Action(0, 0, 0, 0, FORWARD)])
    assert text.count("is missing") == 8 and text.endswith("\n  and 3 more")


def test_work_done_twice_is_named() -> None:
    actions = [*actions_of("1f1b"), Action(1, 50, 1, 2, FORWARD)]
    assert "forward of micro-batch 2 at stage 1 is done 2 times" in message(actions)


def test_device_that_does_not_hold_the_stage_is_named() -> None:
    actions = actions_of("gpipe")
    i = at(actions, 1, 0, FORWARD)
    actions[i] = actions[i]._replace(device=0, tick=-4)
    assert message(actions) == (
        OF + "forward of micro-batch 0 at stage 1 is on device 0, but the stage is on device 1"
    )


def test_two_actions_of_a_device_in_one_tick_are_named() -> None:
    actions = actions_of("gpipe")
    first, second = at(actions, 0, 0, FORWARD), at(actions, 0, 1, FORWARD)
    actions[second] = actions[second]._replace(tick=actions[first].tick)
    assert message(actions) == (
        OF + "device 0 has two actions at tick 0: forward of micro-batch 0 at stage 0, and forward "
        "of micro-batch 1 at stage 0"
    )


def test_one_tick_of_two_devices_is_no_trouble() -> None:
    actions = actions_of("gpipe")
    assert len({a.tick for a in actions}) < len(actions)
    check(actions, num_devices=K, num_stages=K, num_micro_batches=M)


def test_weight_gradient_before_its_backward_is_named() -> None:
    actions = actions_of("zero_bubble_h1")
    i, j = at(actions, 1, 1, BACKWARD), at(actions, 1, 1, WEIGHT_GRADIENT)
    early, late = actions[i].tick, actions[j].tick
    actions[i], actions[j] = actions[i]._replace(tick=late), actions[j]._replace(tick=early)
    assert message(actions) == (
        OF + f"weight gradient of micro-batch 1 at stage 1, at tick {early}, comes before its "
        f"backward, at tick {late}"
    )


def test_backward_before_its_forward_is_named() -> None:
    actions = actions_of("gpipe")
    i = at(actions, 1, 0, BACKWARD)
    actions[i] = actions[i]._replace(tick=-4)
    assert message(actions) == (
        OF + "backward of micro-batch 0 at stage 1, at tick -4, comes before its forward, at tick 1"
    )


def test_mixture_of_kinds_is_named() -> None:
    one = [*actions_of("1f1b"), Action(1, 50, 1, 0, WEIGHT_GRADIENT)]
    text = message(one)
    assert "weight gradient of micro-batch 1 at stage 1 is missing (there are 1 of 6;" in text
    assert "micro-batch 0 at stage 1" not in text and text.count("is missing") == 5
    but_one = actions_of("zero_bubble_h1")
    del but_one[at(but_one, 0, 2, WEIGHT_GRADIENT)]
    assert message(but_one) == (
        OF + "weight gradient of micro-batch 2 at stage 0 is missing (there are 5 of 6; weight "
        "gradients are separate for all work or for none)"
    )


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Action(2, 0, 0, 0, FORWARD), "the devices are numbered 0 to 1, and 2 is not one of them"),
        (Action(-1, 0, 0, 0, FORWARD), "the devices are numbered 0 to 1, and -1 is not one of"),
        (Action(0, 0, 2, 0, FORWARD), "the stages are numbered 0 to 1, and 2 is not one of them"),
        (Action(0, 0, 0, 3, FORWARD), "the micro-batches are numbered 0 to 2, and 3 is not one of"),
        (Action(0, 0, 0, 0, "backwards"), "weight_gradient; did you mean backward?"),
    ],
)
def test_what_there_is_not_is_named(action: Action, says: str) -> None:
    assert says in message([*actions_of("gpipe"), action])


@pytest.mark.parametrize("none", ["num_devices", "num_stages", "num_micro_batches"])
def test_nothing_at_all_is_no_schedule(none: str) -> None:
    sizes = {"num_devices": 2, "num_stages": 2, "num_micro_batches": 2, none: 0}
    with pytest.raises(ScheduleError, match=r"there are 0 .*, expected 1 or more"):
        check([], **sizes)


# --- stuck ---


class Crossed(PipelineSchedule):
    """The devices take the micro-batches in opposite orders, one forward and one backward."""

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        every = range(num_micro_batches)
        for m in every if device == 0 else reversed(every):
            yield Work(device, m, FORWARD)
            yield Work(device, m, BACKWARD)


def test_devices_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    actions = list(schedule_of(Crossed.Params()).actions(2, 2))
    assert len(actions) == 8  # also what will never be done is there, for the check to see
    with pytest.raises(StuckError) as caught:
        check(actions, num_devices=2, num_stages=2, num_micro_batches=2)
    assert str(caught.value) == (
        "the schedule is stuck, no device can continue:\n"
        "  device 0, tick 1: backward of micro-batch 0 at stage 0 waits for backward of "
        "micro-batch 0 at stage 1, which device 1 does at tick 4\n"
        "  device 1, tick 1: forward of micro-batch 1 at stage 1 waits for forward of "
        "micro-batch 1 at stage 0, which device 0 does at tick 2"
    )


def test_device_without_work_is_not_named_as_waiting() -> None:
    actions = schedule_of(Crossed.Params()).actions(2, 2)
    with pytest.raises(StuckError) as caught:
        check(actions, num_devices=3, num_stages=2, num_micro_batches=2)
    assert [line.split(",")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  device 0",
        "  device 1",
    ]


def test_wait_for_work_of_nobody_says_so() -> None:
    orders = [[Action(0, 0, 1, 0, FORWARD)]]
    with pytest.raises(StuckError, match=r"stage 0, which no device does$"):
        raise StuckError(orders, timed([[action[2:] for action in orders[0]]], num_stages=2,
                                       durations={}))  # fmt: skip


# --- whatever is changed ---


def _drop(actions: list[Action], i: int) -> None:
    del actions[i]


def _double(actions: list[Action], i: int) -> None:
    actions.append(actions[i]._replace(tick=1000))


def _move(actions: list[Action], i: int) -> None:
    actions[i] = actions[i]._replace(device=actions[i].device + 1)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([_drop, _double, _move]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**20),
)
def test_any_single_change_of_a_schedule_is_found(
    name: str, change: Callable[[list[Action], int], None], k: int, groups: int, which: int
) -> None:
    schedule = schedule_of(name)
    sizes = {
        "num_devices": k,
        "num_stages": schedule.num_stages(k),
        "num_micro_batches": groups * k,
    }
    actions = list(schedule.actions(k, groups * k))
    check(actions, **sizes)
    # Without its only weight gradient it is another good schedule, whose backward means both.
    assume(len(actions) > 3)
    change(actions, which % len(actions))
    with pytest.raises(ScheduleError):
        check(actions, **sizes)


# --- what is no schedule at all ---


class Yields(PipelineSchedule):
    """Says and does what a test says."""

    class Params(PipelineSchedule.Params):
        """Params of Yields."""

    stages: object = 2
    order_of: object = ()
    actions_of: object = None

    def num_stages(self, num_devices: int) -> int:
        return self.stages  # type: ignore[return-value]

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        return self.order_of  # type: ignore[return-value]

    def actions(self, num_devices: int, num_micro_batches: int) -> Iterator[Action]:
        if self.actions_of is not None:
            return self.actions_of  # type: ignore[return-value]
        return super().actions(num_devices, num_micro_batches)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"stages": 0}, r"Yields\.num_stages\(2\) is 0, expected an integer of at least 1"),
        ({"stages": -1}, r"Yields\.num_stages\(2\) is -1"),
        ({"stages": 2.0}, r"Yields\.num_stages\(2\) is 2\.0"),
        ({"stages": None}, r"Yields\.num_stages\(2\) is None"),
        (
            {"order_of": None},
            r"Yields\.order of device 0 is None, expected an iterable of Work\(stage",
        ),
        ({"order_of": [3]}, r"Yields\.order of device 0 has 3, expected Work\(stage, micro_batch"),
        ({"order_of": ["abc"]}, r"Yields\.order of device 0 has 'abc'"),
        ({"order_of": [(0, "0", FORWARD)]}, r"has \(0, '0', 'forward'\), expected Work"),
        ({"order_of": [(0, 0, None)]}, r"as the kind one of forward, backward, weight_gradient"),
        ({"order_of": [(0, 0, "foward")]}, r"'foward', expected one of .*; did you mean forward\?"),
        ({"order_of": itertools.repeat(Work(0, 0, FORWARD))}, r"device 0 does not end"),
        ({"actions_of": 7}, r"Yields\.actions is 7, expected an iterable of Action\(device"),
        ({"actions_of": [Work(0, 0, FORWARD)]}, r"Yields\.actions has Work\(.*, expected Action"),
        ({"actions_of": [(0, 0.5, 0, 0, FORWARD)]}, r"Yields\.actions has \(0, 0\.5, 0, 0"),
        ({"actions_of": []}, r"forward of micro-batch 0 at stage 0 is missing"),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused_by_name(said: dict[str, object], message: str) -> None:
    schedule = Yields.Params().instantiate()
    for name, value in said.items():
        setattr(schedule, name, value)
    with pytest.raises(ScheduleError, match=message):
        checked_actions(schedule, num_devices=K, num_micro_batches=M)


def test_schedule_may_be_of_plain_tuples() -> None:
    schedule = Yields.Params().instantiate()
    schedule.stages = 1
    schedule.order_of = [(0, m, kind) for m in range(M) for kind in (FORWARD, BACKWARD)]
    found = checked_actions(schedule, num_devices=1, num_micro_batches=M)
    assert [action.work for action in found] == [Work(*work) for work in schedule.order_of]
