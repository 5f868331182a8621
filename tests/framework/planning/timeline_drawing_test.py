"""Pictures of timelines: every mark in its place, within the width; bars of the right area."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from tekso.framework.execution.pipeline.schedule import BACKWARD, FORWARD, SCHEDULES, schedule_of
from tekso.framework.planning.simulator import Timeline, simulate
from tekso.framework.planning.timeline_drawing import draw_png, draw_text

LIGHT, ORANGE = (166, 206, 227), (230, 134, 45)  # bars of forwards, of backwards


def simulated(name: str, k: int, m: int, backward: float = 1.0, forward: float = 1.0) -> Timeline:
    return simulate(
        schedule_of(name).actions(k, m),
        num_devices=k,
        durations=lambda _, kind: {FORWARD: forward, BACKWARD: backward}.get(kind, 1.0),
    )


# --- text ---


def test_text_shows_every_action_as_wide_as_it_is_long() -> None:
    assert draw_text({"simulated": simulated("1f1b", 2, 3, backward=2.0)}, width=36, unit="s") == [
        "simulated: 12 s, 25.0 % idle",
        "device 0 │01··aa2bb·cc│ holds 2",
        "device 1 │·0aa1bb2cc··│ holds 1",
        "          0       12 s",
        "0-9 forward, a-j backward of",
        "micro-batches 0-9, then 10-19, …",
        "· idle; holds: most micro-batches at",
        "once",
    ]
    wide = draw_text({"simulated": simulated("1f1b", 2, 3, backward=2.0)}, width=60)
    assert wide[1] == "device 0 │000111······aaaaaa222bbbbbb···cccccc│ holds 2"


def test_text_shows_weight_gradients_and_the_last_digit_of_micro_batches() -> None:
    lines = draw_text({"": simulated("zero_bubble_h1", 2, 11)}, width=60)
    assert lines[1] == "device 0 │01·aA2bB3cC4dD5eE6fF7gG8hH9iI0jJaA│ holds 2"
    assert lines[2] == "device 1 │·0a1bA2cB3dC4eD5fE6gF7hG8iH9jI0aJA│ holds 2"
    assert lines[4].startswith("0-9 forward, a-j backward, A-J weight gradient of")


def test_measured_and_simulated_have_one_scale() -> None:
    slow = simulated("gpipe", 2, 2, forward=2.0, backward=2.0)
    lines = draw_text({"simulated": simulated("gpipe", 2, 2), "measured": slow}, width=34)
    assert lines[0:6] == [
        "simulated: 6, 33.3 % idle",
        "device 0 │01··ab······│ holds 2",
        "device 1 │·01ab·······│ holds 2",
        "measured: 12, 33.3 % idle",
        "device 0 │0011····aabb│ holds 2",
        "device 1 │··0011aabb··│ holds 2",
    ]


def test_measured_text_starts_with_the_first_action() -> None:
    first = simulated("1f1b", 3, 4, backward=1.5)
    events = tuple(e._replace(start=e.start + 1e6, end=e.end + 1e6) for e in first.events)
    later = Timeline(events, num_devices=3, num_stages=3)
    assert draw_text({"x": later}) == draw_text({"x": first})


def test_text_of_many_actions_shows_the_kind_of_most_work() -> None:
    lines = draw_text({"": simulated("gpipe", 2, 400)}, width=41)
    assert lines[1] == "device 0 │FFFFFFFFFFBBBBBBBBBB│ holds 400"
    assert lines[4] == "F forward, B backward, * several kinds"
    mixed = draw_text({"": simulated("1f1b", 2, 400)}, width=40)
    assert set(mixed[1].split("│")[1]) == {"*"}


def test_text_of_many_devices_leaves_out_the_middle() -> None:
    lines = draw_text({"": simulated("1f1b", 40, 40)})
    shown = [line.split(" │")[0] for line in lines if line.startswith("device")]
    assert len(shown) == 23 and shown[11:13] == ["device 11", "device 29"]
    assert lines[13] == "        ⋮"


def test_text_of_nothing_has_no_marks() -> None:
    assert draw_text({}) == []
    lines = draw_text({"empty": Timeline((), 2, 2)}, width=50)
    assert lines[0] == "empty: 0, 0.0 % idle"
    assert set(lines[1].split("│")[1]) == {"·"} and lines[-1].startswith("· idle")


@settings(max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(1, 4),
       st.integers(40, 160), st.floats(0.1, 20))  # fmt: skip
def test_text_keeps_to_the_width_and_rows_are_of_one_length(
    name: str, k: int, groups: int, width: int, backward: float
) -> None:
    picture = simulated(name, k, k * groups, backward=backward)
    lines = draw_text({"simulated": picture, "again": picture}, width=width, unit="s")
    rows = [line for line in lines if line.startswith("device")]
    assert len(rows) == 2 * k and rows[:k] == rows[k:]
    assert max(map(len, rows)) <= width
    assert len({row.rindex("│") for row in rows}) == 1


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_share_of_idle_marks_is_the_idle_share(name: str) -> None:
    picture = simulated(name, 4, 8)
    rows = [line.split("│")[1] for line in draw_text({"": picture}) if line.startswith("device")]
    idle = sum(row.count("·") for row in rows) / sum(map(len, rows))
    assert idle == pytest.approx(picture.idle_share, abs=1e-9)


# --- PNG ---


def where(png: bytes, colour: tuple[int, int, int]) -> np.ndarray:
    """Whether each pixel [height, width] has a colour."""
    image = np.round(255 * imread(io.BytesIO(png))[..., :3])
    is_colour: np.ndarray = np.abs(image - colour).max(axis=-1) <= 1
    return is_colour


def test_png_has_bars_of_the_area_of_the_work() -> None:
    png = draw_png({"simulated": simulated("gpipe", 2, 3, backward=2.0)}, title="gpipe", unit="s")
    # Numbers, edges and the legend take a little of the bars away, or add to them.
    area = where(png, ORANGE).sum() / where(png, LIGHT).sum()
    assert area == pytest.approx(2.0, rel=0.15)


def test_png_shows_simulated_above_measured_on_one_scale() -> None:
    quick, slow = simulated("gpipe", 2, 3), simulated("gpipe", 2, 3, forward=3.0, backward=3.0)
    png = draw_png({"simulated": quick, "measured": slow})
    is_bar = where(png, ORANGE) | where(png, LIGHT)
    height = is_bar.shape[0]
    upper = np.flatnonzero(is_bar[: height * 2 // 5].any(axis=0))
    lower = np.flatnonzero(is_bar[height // 2 : height * 4 // 5].any(axis=0))
    assert upper[0] == pytest.approx(lower[0], abs=2)
    assert np.ptp(lower) / np.ptp(upper) == pytest.approx(3.0, rel=0.02)


def test_png_of_nothing_is_a_picture() -> None:
    for timelines in ({}, {"empty": Timeline((), 2, 2)}):
        assert draw_png(timelines).startswith(b"\x89PNG")
