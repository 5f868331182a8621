"""Draws timelines, one below the other, as text for a terminal or as a PNG.

    simulated: 14 ticks, 28.6 % idle
    device 0 │012··a3b4c·d·e│ holds 3
    device 1 │·01·a2b3c4d·e·│ holds 2
    device 2 │··0a1b2c3d4e··│ holds 1
              0           14

All have the same scale, so that a measured and a simulated timeline can be compared.
"""

from __future__ import annotations

import io
import logging
import textwrap
from collections.abc import Mapping
from typing import Any

from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    Event,
    Kind,
)
from tekso.framework.planning.simulator import Timeline

_MARKS: dict[Kind, str] = {
    FORWARD: "0123456789",
    BACKWARD: "abcdefghij",
    WEIGHT_GRADIENT: "ABCDEFGHIJ",
}
_COARSE_MARKS: dict[Kind, str] = {FORWARD: "F", BACKWARD: "B", WEIGHT_GRADIENT: "W"}
_COLOURS: dict[Kind, tuple[str, str]] = {  # bar and number; bars differ in brightness too
    FORWARD: ("#a6cee3", "black"),
    BACKWARD: ("#e6862d", "black"),
    WEIGHT_GRADIENT: ("#4b2e83", "white"),
}
_IDLE, _SEVERAL, _GAP = "·", "*", "⋮"
_MOST = 0.6  # in a coarse drawing, the idle share, or share of one kind, that decides the mark
_ROUNDOFF = 1e-6
_ROWS = 24  # maximum number of devices that the text shows
_COLUMNS = 4  # maximum number of columns of a short action
_MIN_ROOM = 10
_INCHES, _DPI = 12.0, 100
_DIGIT_PIXELS = 9


def draw_text(timelines: Mapping[str, Timeline], *, width: int = 100, unit: str = "") -> list[str]:
    """Returns lines with one row per device and the time to the right.

    The character of an action shows its kind and the last digit of its micro-batch, and its width
    shows its duration. If there are too many actions, a letter shows the most frequent kind of work
    in each column.

    Args:
      timelines: {title: timeline}.
      width: maximum number of columns.
      unit: unit of time.
    """
    if not timelines:
        return []
    num_devices = max(t.num_devices for t in timelines.values())
    label = len(f"device {num_devices - 1}")
    held = max((len(_held(h)) for t in timelines.values() for h in t.held), default=0)
    span = max(t.makespan for t in timelines.values())
    durations = sorted(e.end - e.start for t in timelines.values() for e in t.events)
    room = max(width - label - held - 3, _MIN_ROOM)
    columns = _columns(span, durations, room)
    column = span / columns  # time of one column
    is_coarse = bool(durations) and column > 1.001 * durations[len(durations) // 2]
    lines: list[str] = []
    for name, timeline in timelines.items():
        lines.append(_heading(name, timeline, unit))
        rows = _rows(timeline, columns, column, is_coarse=is_coarse)
        for device in _shown(timeline.num_devices):
            if device is None:
                lines.append(f"{_GAP:>{label}}")
                continue
            title = f"device {device}"
            lines.append(f"{title:<{label}} │{rows[device]}│{_held(timeline.held[device])}")
    end = _time(span, unit)
    lines.append(f"{'':{label}}  0{end:>{max(columns - 1, len(end) + 1)}}")
    legend = _legend(timelines, is_coarse=is_coarse)
    return [*lines, *(part for line in legend for part in _wrapped(line, width))]


def draw_png(timelines: Mapping[str, Timeline], *, title: str = "", unit: str = "") -> bytes:
    """Returns a PNG of the `figure`."""
    file = io.BytesIO()
    figure(timelines, title=title, unit=unit).savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def figure(timelines: Mapping[str, Timeline], *, title: str = "", unit: str = "") -> Any:
    """Returns a figure of matplotlib: a bar per action, with its micro-batch if there is room.

    Args:
      timelines: {title: timeline}.
      title: title above the picture.
      unit: unit of time.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    rows = sum(min(t.num_devices, 2 * _ROWS) for t in timelines.values())
    height = 0.9 + 0.7 * len(timelines) + 0.3 * rows
    drawn = Figure(figsize=(_INCHES, height), layout="constrained")
    FigureCanvasAgg(drawn)
    if title:
        drawn.suptitle(title)
    span = max((t.makespan for t in timelines.values()), default=0.0)
    for index, (name, timeline) in enumerate(timelines.items()):
        axes = drawn.add_subplot(len(timelines), 1, index + 1)
        _draw_bars(axes, timeline, span)
        axes.set_title(_heading(name, timeline, unit), fontsize="medium")
        axes.set_ylabel("device")
        axes.set_xlim(0, span or 1.0)
        axes.set_ylim(timeline.num_devices - 0.5, -0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if timelines:
        axes.set_xlabel(f"time ({unit})" if unit else "time")
    used = {event.action.kind for t in timelines.values() for event in t.events}
    handles = [
        Patch(facecolor=_COLOURS[kind][0], label=kind.replace("_", " "))
        for kind in KINDS
        if kind in used
    ]
    if handles:
        drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return drawn


# --- text ---


def _columns(span: float, durations: list[float], room: int) -> int:
    """Returns the number of columns; a short action gets a whole number if there is room."""
    short = durations[len(durations) // 4] if durations else 0.0
    if short <= 0 or span > room * short:
        return room
    actions = span / short
    return round(min(int(room / actions), _COLUMNS) * actions)


def _rows(timeline: Timeline, columns: int, column: float, *, is_coarse: bool) -> list[str]:
    """Returns the row of each device; a column has the mark with the largest share of its time."""
    shares: list[list[dict[str, float]]] = [
        [{} for _ in range(columns)] for _ in range(timeline.num_devices)
    ]
    for event in timeline.events if column else ():
        first, last = ((t - timeline.start) / column for t in (event.start, event.end))
        mark = _mark(event.action, is_coarse=is_coarse)
        for c in range(int(first), min(int(last) + 1, columns)):
            share = min(last, c + 1) - max(first, c)
            here = shares[event.action.device][c]
            here[mark] = here.get(mark, 0.0) + share
    return ["".join(_most(here, is_coarse=is_coarse) for here in row) for row in shares]


def _most(shares: dict[str, float], *, is_coarse: bool) -> str:
    """Returns the mark of a column, given the shares of its time."""
    if not shares:
        return _IDLE
    mark = max(shares, key=lambda mark: shares[mark])
    busy = sum(shares.values())
    if 1.0 - busy - _ROUNDOFF > (_MOST if is_coarse else shares[mark]):
        return _IDLE
    return _SEVERAL if is_coarse and shares[mark] < _MOST * busy else mark


def _mark(action: Action, *, is_coarse: bool) -> str:
    return (_COARSE_MARKS if is_coarse else _MARKS)[action.kind][
        0 if is_coarse else action.micro_batch % 10
    ]


def _shown(num_devices: int) -> list[int | None]:
    """Returns the devices that get a row; None marks a gap."""
    if num_devices <= _ROWS:
        return list(range(num_devices))
    half = _ROWS // 2
    return [*range(half), None, *range(num_devices - half + 1, num_devices)]


def _heading(name: str, timeline: Timeline, unit: str) -> str:
    return f"{name}: {_time(timeline.makespan, unit)}, {100 * timeline.idle_share:.1f} % idle"


def _held(count: float) -> str:
    return f" holds {count:.4g}"


def _time(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".strip()


def _legend(timelines: Mapping[str, Timeline], *, is_coarse: bool) -> list[str]:
    used = {event.action.kind for t in timelines.values() for event in t.events}
    marks = _COARSE_MARKS if is_coarse else {k: f"{m[0]}-{m[-1]}" for k, m in _MARKS.items()}
    each = ", ".join(f"{marks[kind]} {kind.replace('_', ' ')}" for kind in KINDS if kind in used)
    rest = f"{_IDLE} idle; holds: most micro-batches at once"
    if is_coarse:
        return [f"{each}, {_SEVERAL} several kinds", rest]
    return [f"{each} of micro-batches 0-9, then 10-19, …", rest] if each else [rest]


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


# --- PNG ---


def _draw_bars(axes: Any, timeline: Timeline, span: float) -> None:
    bars: dict[tuple[int, Kind], list[Event]] = {}
    for event in timeline.events:
        bars.setdefault((event.action.device, event.action.kind), []).append(event)
    pixels = 0.9 * _INCHES * _DPI / (span or 1.0)  # per unit of time
    for (device, kind), events in bars.items():
        colour, ink = _COLOURS[kind]
        wide = [(event.end - event.start) * pixels >= 4 for event in events]
        axes.broken_barh(
            [(event.start - timeline.start, event.end - event.start) for event in events],
            (device - 0.4, 0.8),
            facecolors=colour,
            edgecolors="white",
            linewidth=[0.5 if is_wide else 0.0 for is_wide in wide],
            snap=any(wide),  # snapping bars of less than a pixel would create artefacts
        )
        for event in events:
            number = str(event.action.micro_batch)
            if (event.end - event.start) * pixels >= _DIGIT_PIXELS * len(number):
                middle = (event.start + event.end) / 2 - timeline.start
                axes.text(
                    middle, device, number, color=ink, ha="center", va="center", fontsize="small"
                )
