"""Draws a comparison as one HTML file: tables, curves as inline SVG, samples side by side.

The file has no scripts, and loads nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from tekso.framework.run.report.lines import duration as duration_text
from tekso.framework.run.report.lines import magnitude, number
from tekso.tools.comparison.fields import why_missing
from tekso.tools.comparison.runs import ComparedRun, DifferentField, Group, Point
from tekso.tools.comparison.tables import ComparisonTable

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_WIDTH, _HEIGHT = 380, 260  # of a picture, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 40
_MOST_POINTS = 500
_CUT_OFF = 0.02  # share of the largest values that a curve may leave out

_STYLE = """
body { font: 14px/1.45 sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em .2em 0; text-align: left;
  vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
small { color: #777; }
svg text { font: 11px sans-serif; fill: #444; }
pre { white-space: pre-wrap; max-width: 38em; max-height: 30em; overflow: auto; margin: 0;
  background: #f6f6f6; padding: .6em; }
.row { display: flex; flex-wrap: wrap; gap: 1em; }
"""

Axis = tuple[str, Callable[[Point], float | None]]


def page(
    groups: Sequence[Group], different: Sequence[DifferentField], tables: Sequence[ComparisonTable]
) -> str:
    """Returns the HTML of a comparison.

    Args:
      groups: the runs in groups; each has a colour.
      different: the fields of Params that differ.
      tables: results and cost.
    """
    runs = [run for group in groups for run in group.runs]
    title = "Comparison of " + ", ".join(run.path for run in runs)
    parts = [f"<h1>{escape(title)}</h1>", _legend(groups)]
    for table in tables:
        parts += [f"<h2>{escape(table.title)}</h2>", _table(table)]
        parts += [f"<p><small>{escape(note)}</small></p>" for note in table.notes]
    parts += ["<h2>Params that differ</h2>", _params(different, runs)]
    parts += ["<h2>Curves</h2>", *_curves(groups)]
    parts += ["<h2>Samples</h2>", *_samples(runs)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}'
        f"</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _legend(groups: Sequence[Group]) -> str:
    items = [
        f'<li style="color:{_colour(i)}">{escape(group.name)}: '
        f"{escape(', '.join(f'{run.path} (seed {run.seed})' for run in group.runs))}</li>"
        for i, group in enumerate(groups)
    ]
    return f"<ul>{''.join(items)}</ul>"


def _table(table: ComparisonTable) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in table.header)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if i in table.right else ''}>{escape(text)}</td>"
            for i, text in enumerate(row)
        )
        + "</tr>"
        for row in table.rows
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _params(different: Sequence[DifferentField], runs: Sequence[ComparedRun]) -> str:
    if not different:
        return "<p>None.</p>"
    head = "".join(f"<th>{escape(run.path)}</th>" for run in runs)
    rows = []
    for one in different:
        cells = [
            f"<td>{escape(value.text)}<br><small>{escape(value.origin)}</small></td>"
            if value is not None
            else f"<td><small>{escape(why_missing(one.path, run))}</small></td>"
            for run, value in zip(runs, one.values, strict=True)
        ]
        rows.append(f"<tr><td>{escape(one.path)}</td>{''.join(cells)}</tr>")
    return f"<table><tr><th>field</th>{head}</tr>{''.join(rows)}</table>"


def _samples(runs: Sequence[ComparedRun]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.samples)
    parts = []
    for name in names:
        cells = [
            f"<div><b>{escape(run.path)}</b><pre>{escape(run.samples[name])}</pre></div>"
            for run in runs
            if name in run.samples
        ]
        parts += [f"<h3>{escape(name)}</h3>", f'<div class="row">{"".join(cells)}</div>']
    return parts or ["<p>None.</p>"]


# --- curves ---


def _curves(groups: Sequence[Group]) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    units = {run.unit for run in runs} - {""}
    axes: list[Axis] = [("step", lambda point: point.step)]
    if len(units) == 1:
        axes.append((f"{units.pop()} seen", lambda point: point.seen))
    axes.append(("seconds of the run", lambda point: point.seconds))
    parts = []
    for name in dict.fromkeys(key for run in runs for key in run.curves):
        if _is_shown(name) and any(len(run.curves.get(name, ())) > 1 for run in runs):
            pictures = [svg(groups, name, axis) for axis in axes]
            parts += [f"<h3>{escape(name)}</h3>", f'<div class="row">{"".join(pictures)}</div>']
    return parts or ["<p>None.</p>"]


def _is_shown(curve: str) -> bool:
    split, _, name = curve.partition("/")
    hidden = ("wait_share", "eval_seconds", "nonfinite_total", "nonfinite_consecutive")
    return name not in hidden and not (split == "train" and name == "total_loss")


def svg(groups: Sequence[Group], curve: str, axis: Axis) -> str:
    """Returns a picture of a curve of all runs; runs of a group have one colour."""
    label, at = axis
    lines = [
        (
            i,
            [
                (x, point.value)
                for point in run.curves.get(curve, ())
                if (x := at(point)) is not None
            ],
        )
        for i, group in enumerate(groups)
        for run in group.runs
    ]
    lines = [(i, _thinned(line)) for i, line in lines if line]
    if not lines:
        return ""
    xs = [x for _, line in lines for x, _ in line]
    ys = sorted(y for _, line in lines for _, y in line)
    left, right = min(xs), max(xs)
    low, high = ys[0], ys[-1 - int(_CUT_OFF * len(ys))]
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - room, high + room
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        share = (x - left) / (right - left) if right > left else 0.5
        shown = max(low, min(high, y))
        return f"{_LEFT + wide * share:.1f},{_TOP + tall * (high - shown) / (high - low):.1f}"

    drawn = [
        f'<polyline fill="none" stroke="{_colour(i)}" stroke-width="1.4" stroke-opacity="0.8" '
        f'points="{" ".join(place(x, y) for x, y in line)}"/>'
        for i, line in lines
    ]
    bottom = _TOP + tall
    ticks = [
        *(
            _text(_LEFT - 6, _tick(y, low, high, tall), number(y, 3), "end")
            for y in _between(low, high)
        ),
        *(
            _text(_LEFT + wide * share, bottom + 15, _shown(left + share * (right - left), label))
            for share in (0.0, 0.5, 1.0)
        ),
        _text(_LEFT + wide / 2, bottom + 32, label),
    ]
    frame = (
        f'<rect x="{_LEFT}" y="{_TOP}" width="{wide}" height="{tall}" fill="none" stroke="#bbb"/>'
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(curve)} by {escape(label)}">{frame}{"".join(drawn + ticks)}</svg>'
    )


def _between(low: float, high: float) -> list[float]:
    return [low + (high - low) * share for share in (0.1, 0.5, 0.9)]


def _tick(y: float, low: float, high: float, tall: float) -> float:
    return _TOP + tall * (high - y) / (high - low) + 4


def _shown(x: float, label: str) -> str:
    return duration_text(x) if label.startswith("seconds") else magnitude(x)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _thinned(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = math.ceil(len(line) / _MOST_POINTS)
    return [*line[:-1:stride], line[-1]]


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
