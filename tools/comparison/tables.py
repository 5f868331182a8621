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
from tekso.tools.comparison import alignment, statistics
from tekso.tools.comparison.alignment import ComparedGroup
from tekso.tools.comparison.runs import Best, ComparedRun, Group

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


def results(
    groups: Sequence[Group], metric: str, best: Best | None = None, axis: str | None = None
) -> ComparisonTable:
    """Returns the values of a curve in every group, compared with the first group.

    Args:
      groups: groups of runs.
      metric: name of the curve, "dev/loss".
      best: which values are best; None: those at one position are compared.
      axis: what the position is; see `alignment.equal_positions`.

    Raises:
      UsageError: the runs do not have the axis.
    """
    if best is None:
        found = alignment.equal_positions(groups, metric, axis)
    else:
        found = alignment.best_values(groups, metric, best)
    rows, notes, untested = [], [], []
    first = found.groups[0].tested
    for i, (group, one) in enumerate(zip(groups, found.groups, strict=True)):
        count = str(len(one.values))
        if not (own := one.tested):
            share = f"({len(one.diverged)} of {len(group.runs)})"
            rows.append([group.name, count, f"diverged {share}" if one.diverged else "-"])
            rows[-1] += ["-", "", "", ""]
            continue
        summary = statistics.summary(own)
        row = [group.name, count, number(summary.mean), _or_dash(summary.std)]
        if i == 0 or not first:
            rows.append([*row, "", "", ""])
            continue
        test = statistics.welch(first, own)
        p = "-" if test.p is None else f"{test.p:.3g}"
        rows.append([*row, f"{test.difference:+.4g}", p, _seeds(test)])
        if test.p is None:
            untested.append(group.name)
        else:
            notes.append(_sentence(groups[0].name, group.name, test))
    if untested:
        notes.append(_untested(groups[0].name, untested))
    notes += [*found.notes, *_warnings(groups, found.groups, metric)]
    notes.append(
        "Spread: sample standard deviation. p: Welch's t test, two-sided. Seeds to decide: runs "
        "that each group needs, to find a difference of this size at the level of 5 % with a "
        "probability of 80 %."
    )
    header = ("group", "runs", "mean", "spread", "difference", "p", "seeds to decide")
    return ComparisonTable(found.title, header, rows, (1, 2, 3, 4, 5, 6), notes)


def _warnings(groups: Sequence[Group], compared: Sequence[ComparedGroup], metric: str) -> list[str]:
    """Returns sentences about runs that make the table misleading."""
    found = []
    tasks = dict.fromkeys(_task(run) for one in compared for run, _ in one.values)
    if len(tasks) > 1:
        found.append(
            f"The tasks differ ({', '.join(tasks)}), so their {metric} may not measure the same."
        )
    for group, one in zip(groups, compared, strict=True):
        found += [f"{run.damage}." for run in group.runs if run.damage]
        seeds = collections.Counter(run.seed for run, _ in one.values)
        repeated = sorted(seed for seed, count in seeds.items() if count > 1)
        if repeated:
            found.append(
                f"Several runs of {group.name} have the same seed ({', '.join(repeated)}). They "
                "are not independent, so its spread and p are too small."
            )
        elif len(one.values) > 1 and len({value for _, value in one.values}) == 1:
            found.append(
                f"All runs of {group.name} have the same {metric}, although their seeds differ, so "
                "its spread of 0 and p say nothing: does the seed change anything?"
            )
    return found


def _task(run: ComparedRun) -> str:
    """Returns the name of the class of the task of a run."""
    text = run.params["task"].text if "task" in run.params else "?"
    return text.rpartition(":")[2].strip('")')


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
    """Returns a sentence about a difference that was tested."""
    who, p = f"{other} against {first}", f"(p = {test.p:.3g})"
    if test.is_decided:
        return f"{who}: the difference exceeds the spread {p}."
    if test.t == 0.0:
        return f"{who}: there is no difference {p}."
    more = ""
    if test.seeds is not None:
        need = f"about {counted(test.seeds, 'seed')} each (with 80 % probability)"
        more = f" A difference of this size would be decided by {need}."
    if test.t is not None and abs(test.t) < 1.0:
        none = "so there may be none"
        return f"{who}: the difference is less than its standard error {p}, {none}.{more}"
    return f"{who}: the spread may explain the difference {p}.{more}"


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
