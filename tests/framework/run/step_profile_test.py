from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import tensorflow as tf

from tekso.framework.run.step_profile import StepProfile


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    profiler = tf.profiler.experimental
    monkeypatch.setattr(profiler, "start", lambda folder: events.append("start"))
    monkeypatch.setattr(profiler, "stop", lambda: events.append("stop"))
    monkeypatch.setattr(profiler, "Trace", lambda *args, **options: contextlib.nullcontext())
    return events


@pytest.mark.parametrize(
    ("calls", "wanted", "expected"),
    [
        ([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)], "1 2 start 3 4 stop 5", "profile of steps 3-4"),
        ([(1, 2), (3, 6), (7, 8)], "1 start 3 stop 7", "profile of steps 3-6: "),
        ([(1, 8)], "start 1 stop", "profile of steps 1-8: "),
        ([(2, 2), (3, 3)], "2 start 3 stop", "profile of step 3: "),
        ([(2, 2), (3, 4)], "2 start 3 stop", "profile of steps 3-4: "),
        ([(5, 5), (6, 6)], "5 6", "no profile was written: this process did not run steps 3-4"),
    ],
)  # fmt: skip
def test_the_calls_with_the_steps_are_profiled(
    calls: list[tuple[int, int]], wanted: str, expected: str, events: list[str], tmp_path: Path
) -> None:
    lines: list[str] = []
    with StepProfile(3, 4, folder=str(tmp_path / "profile"), log=lines.append) as profile:
        for first, last in calls:
            with profile.around(first, last):
                events.append(str(first))
    assert events == wanted.split()
    (line,) = lines
    assert line.startswith(expected)


def test_a_profile_that_will_not_be_written_is_reported_before_the_steps() -> None:
    lines: list[str] = []
    profile = StepProfile(3, 4, folder="", log=lines.append)
    profile.check_run(0, 3)
    profile.check_run(3, 9)
    assert lines == []
    profile.check_run(4, 9)
    profile.check_run(0, 2)
    assert lines == [
        "no profile will be written of steps 3-4: 4 are done",
        "no profile will be written of steps 3-4: run.steps is 2",
    ]
    with profile:  # says nothing more
        pass
    assert len(lines) == 2
