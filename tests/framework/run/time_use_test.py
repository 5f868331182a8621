from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tekso.framework.run import modes, time_use
from tekso.framework.run.pace import Pace
from tekso.framework.run.time_use import TimeUse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def known(use: TimeUse) -> dict[str, float]:
    return {name: value for name, value in use.seconds().items() if value}


def test_seconds_of_activities_add_up_and_inner_blocks_do_not_count_twice() -> None:
    clock = Clock()
    use = TimeUse(begin=97.0, clock=clock)
    pace = Pace(clock, use)
    clock.now += 1.0
    use.switch("step")
    with pace.waiting():
        clock.now += 2.0
    clock.now += 4.0
    with pytest.raises(RuntimeError), pace.paused("evaluation"):
        clock.now += 8.0
        with use.during("checkpoint"):
            clock.now += 16.0
        clock.now += 32.0
        raise RuntimeError
    clock.now += 64.0
    assert known(use) == {
        "start": 4.0, "input": 2.0, "step": 68.0, "evaluation": 40.0, "checkpoint": 16.0
    }  # fmt: skip
    assert math.fsum(use.seconds().values()) == clock.now - 97.0


def test_a_resumed_process_takes_over_seconds_and_loses_those_after_its_step() -> None:
    clock = Clock()
    use = TimeUse(clock=clock)
    clock.now += 3.0
    kept = {"start": 2.0, "step": 10.0, "lost": 1.0}
    use.resume(kept, {**kept, "step": 25.0, "evaluation": 4.0})
    assert known(use) == {"start": 5.0, "step": 10.0, "lost": 20.0}
    # A damaged record counts as nothing.
    other = TimeUse(clock=clock)
    other.resume({"step": "x", "start": None, "lost": -1.0}, {"step": math.nan})
    assert known(other) == {}


def test_a_rolled_back_process_loses_its_own_time() -> None:
    clock = Clock()
    use = TimeUse(clock=clock)
    use.resume({}, {})
    clock.now += 3.0
    use.switch("step")
    clock.now += 10.0
    kept = use.seconds()
    clock.now += 5.0
    use.resume(kept, use.seconds())
    clock.now += 7.0
    assert known(use) == {"start": 3.0, "step": 17.0, "lost": 5.0}


@pytest.mark.parametrize(
    ("seconds", "named", "advice"),
    [
        ({"start": 5.0, "step": 70.0, "input": 25.0}, "input, 25%", "preprocessing"),
        ({"step": 50.0, "evaluation": 50.0}, "evaluation, 50%", "run.eval_every_steps"),
        ({"step": 60.5, "compile": 39.5}, "compile, 40%", "a longer run"),  # as rounded
        ({"step": 60.0, "lost": 40.0, "input": 25.0}, "lost, 32%", "save more often"),
    ],
)
def test_the_bottleneck_is_named_with_what_to_do(
    seconds: dict[str, float], named: str, advice: str
) -> None:
    sentence = time_use.bottleneck(seconds)
    assert named in sentence and advice in sentence
    text = " ".join(" ".join(time_use.lines(seconds)).split())
    assert sentence in text and text.startswith("time of the run: ")


@pytest.mark.parametrize("width", range(40, 80))
def test_no_line_ends_between_an_activity_and_its_time(width: int) -> None:
    seconds = dict.fromkeys(time_use.ACTIVITIES, 10.0)
    found = time_use.lines(seconds, width=width)
    for name in time_use.ACTIVITIES:
        assert any(f"{name} 10s (11%)" in line for line in found)


def test_a_buffer_that_has_all_of_a_checkpoint_is_not_to_be_made_larger() -> None:
    seconds = {"step": 50.0, "checkpoint": 50.0}
    advice = "; save less often (run.checkpoint_every_steps)"
    assert time_use.bottleneck(seconds, fits_buffer=True).endswith(advice)
    assert "run.checkpoint_buffer_mb" in " ".join(time_use.lines(seconds, width=200))
    assert "buffer" not in " ".join(time_use.lines(seconds, fits_buffer=True, width=200))


def test_shapes_of_batches_are_named_only_if_there_were_several() -> None:
    seconds = {"step": 50.0, "compile": 50.0}
    assert time_use.bottleneck(seconds).endswith("; a longer run has less of it")
    several = " ".join(" ".join(time_use.lines(seconds, shapes=2)).split())
    assert several.endswith("; a longer run, or fewer shapes of batches, has less of it")


def test_a_run_that_mostly_trains_has_no_bottleneck() -> None:
    assert time_use.bottleneck({"step": 60.6, "compile": 39.4}) == ""
    assert time_use.bottleneck({"step": 90.0, "compile": 10.0}) == ""
    assert time_use.bottleneck({}) == "" and time_use.lines({}) == []
    (line,) = time_use.lines({"step": 90.0, "compile": 10.0, "other": 0.1})
    assert line == "  time of the run: 1m40s: step 1m30s (90%), compile 10s (10%)"


@pytest.mark.parametrize(("held", "waited"), [(False, 5.0), (True, 0.0)])
def test_steps_that_wait_for_values_to_be_written_wait_for_the_checkpoint(
    held: bool, waited: float
) -> None:
    """Unless the program itself waits, between the gradients and the update."""
    clock = Clock()

    def wait() -> None:
        clock.now += 5.0

    gate: Any = SimpleNamespace(wait=wait, is_open=True)
    report: Any = SimpleNamespace(time_use=TimeUse(clock=clock))
    report.time_use.switch("step")
    with modes._around_steps(gate, report, held, 3, 4):
        clock.now += 2.0
    assert known(report.time_use) == {"step": 2.0, **({"checkpoint": waited} if waited else {})}
