"""The tables of a comparison, for a terminal and for HTML; the rows of its CSV file."""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import math
from collections.abc import Sequence

from tekso.framework.counting import counted
from tekso.framework.run.report.lines import duration, magnitude, number
from tekso.framework.run.time_use import ACTIVITIES
from tekso.tools.comparison import statistics
from tekso.tools.comparison.runs import Best, ComparedRun, Group, Point

_LEAST_SHARE = 0.005  # of the time of a run, for a column


@dataclasses.dataclass(frozen=True)
class ComparisonTable:
    """A table.

    Attributes:
      title: its title.
      header: headings.
      rows: cells.
      right: indices of the columns with figures.
      notes: sentences below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int]
    notes: Sequence[str] = ()


def results(groups: Sequence[Group], metric: str, best: Best | None = None) -> ComparisonTable:
    """Returns the last or best value of a curve in every group, compared with the first group.

    Args:
      groups: groups of runs.
      metric: name of the curve, "dev/loss".
      best: which values are best; None: the last value of each run is compared.
    """
    values = [_values(group, metric, best) for group in groups]
    rows, notes, untested = [], [], []
    for i, (group, own) in enumerate(zip(groups, values, strict=True)):
        if not own:
            rows.append([group.name, "0", "-", "-", "", "", ""])
            continue
        one = statistics.summary(own)
        row = [group.name, str(one.count), number(one.mean), _or_dash(one.std)]
        if i == 0 or not values[0]:
            rows.append([*row, "", "", ""])
            continue
        test = statistics.welch(values[0], own)
        p = "-" if test.p is None else f"{test.p:.3g}"
        rows.append([*row, f"{test.difference:+.4g}", p, _seeds(test)])
        if test.p is None:
            untested.append(group.name)
        else:
            notes.append(_sentence(groups[0].name, group.name, test))
    if untested:
        notes.append(_untested(groups[0].name, untested))
    notes += _warnings(groups, metric, best)
    notes.append(
        "Spread: sample standard deviation. p: Welch's t test, two-sided. Seeds to decide: runs "
        "that each group needs, to find a difference of this size at the level of 5 % with a "
        "probability of 80 %."
    )
    header = ("group", "runs", "mean", "spread", "difference", "p", "seeds to decide")
    title = f"best {metric}" if best else f"{metric} at the end"
    return ComparisonTable(title, header, rows, (1, 2, 3, 4, 5, 6), notes)


def _warnings(groups: Sequence[Group], metric: str, best: Best | None) -> list[str]:
    """Returns sentences about runs that make the table misleading."""
    found = []
    steps = {point.step for g in groups for r in g.runs if (point := r.last(metric))}
    if len(steps) > 1 and best is None:
        found.append(f"The runs end at different steps: {', '.join(map(str, sorted(steps)))}.")
    tasks = dict.fromkeys(_task(r) for g in groups for r in g.runs if _point(r, metric, best))
    if len(tasks) > 1:
        found.append(
            f"The tasks differ ({', '.join(tasks)}), so their {metric} may not measure the same."
        )
    for group in groups:
        for run in group.runs:
            if run.damage:
                found.append(f"{run.damage}.")
            shown = _point(run, metric, best)
            if shown is None:
                kind = "finite " if metric in run.not_finite else ""
                found.append(f"{run.path} has no {kind}{metric}, and is left out.")
            elif metric in run.not_finite:
                found.append(
                    f"The last {metric} of {run.path} is not finite; the table has the value at "
                    f"step {shown.step}."
                )
        seeds = collections.Counter(run.seed for run in group.runs if _point(run, metric, best))
        repeated = sorted(seed for seed, count in seeds.items() if count > 1)
        if repeated:
            found.append(
                f"Several runs of {group.name} have the same seed ({', '.join(repeated)}). They "
                "are not independent, so its spread and p are too small."
            )
    return found


def _task(run: ComparedRun) -> str:
    """Returns the name of the class of the task of a run."""
    text = run.params["task"].text if "task" in run.params else "?"
    return text.rpartition(":")[2].strip('")')


def _values(group: Group, metric: str, best: Best | None) -> list[float]:
    points = (_point(run, metric, best) for run in group.runs)
    return [point.value for point in points if point is not None]


def _point(run: ComparedRun, metric: str, best: Best | None) -> Point | None:
    return run.last(metric) if best is None else run.best(metric, best)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


def _seeds(test: statistics.WelchTest) -> str:
    if test.p is None or test.difference == 0.0:
        return "-"
    return str(test.seeds) if test.seeds is not None else "more than 10,000"


def _untested(first: str, others: Sequence[str]) -> str:
    """Returns a sentence about groups whose difference cannot be tested, for lack of runs."""
    name, what = others[0], "difference"
    if len(others) > 1:
        name, what = f"{len(others)} groups", "differences"
    return (
        f"{name} against {first}: one run does not show a spread; train each with two seeds or "
        f"more to test the {what}."
    )


def _sentence(first: str, other: str, test: statistics.WelchTest) -> str:
    if test.is_decided:
        return f"{other} against {first}: the difference exceeds the spread (p = {test.p:.3g})."
    more = "" if test.seeds is None else f"; {counted(test.seeds, 'seed')} each would decide it"
    return (
        f"{other} against {first}: the spread may explain the difference (p = {test.p:.3g}){more}."
    )


def cost(groups: Sequence[Group]) -> ComparisonTable:
    """Returns steps, units and time of every run, without activities that no run spent time on."""
    rows = []
    spent = [run.seconds for group in groups for run in group.runs]
    activities = [
        name
        for name in ACTIVITIES
        if any(_LEAST_SHARE * math.fsum(s.values()) < s.get(name, 0.0) for s in spent)
    ]
    for group in groups:
        for run in group.runs:
            ends = [points[-1] for points in run.curves.values()]  # of logged steps and evaluations
            last = max(ends, key=lambda point: point.step, default=None)
            total = math.fsum(run.seconds.values())
            shares = [run.seconds.get(name, 0.0) for name in activities]
            rows.append(
                [
                    run.path,
                    run.seed,
                    str(last.step) if last else "-",
                    magnitude(last.seen) if last and last.seen else "-",
                    duration(total) if total else "-",
                    *(f"{100 * share / total:.0f}%" if total else "-" for share in shares),
                ]
            )
    units = {run.unit for group in groups for run in group.runs} - {""}
    header = ("run", "seed", "steps", " or ".join(sorted(units)) or "units", "time", *activities)
    return ComparisonTable("Cost", header, rows, tuple(range(1, len(header))))


def csv_text(groups: Sequence[Group]) -> str:
    """Returns all points of all curves, a row for each."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("run", "group", "seed", "curve", "step", "seen", "seconds", "value"))
    for group in groups:
        for run in group.runs:
            for name, points in run.curves.items():
                for p in points:
                    cells = ("" if x is None else repr(x) for x in (p.seen, p.seconds, p.value))
                    writer.writerow((run.path, group.name, run.seed, name, p.step, *cells))
    return file.getvalue()
