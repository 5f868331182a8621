"""Chooses where runs are compared, and which of their values: never values of different steps.

step       10    20    30    40    50        compared at step 40, which both groups have
group a    ●     ●     ●     ●     ●
           ●     ●                           ended early: left out, and named
group b    ●     ●     ●     ●
           ●     ●     NaN                   diverged: the group has no mean
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tekso.framework.run.early_stopping_rule import EarlyStoppingRule
from tekso.framework.run.metrics_log import TRAIN
from tekso.framework.run.report.lines import duration, magnitude, number
from tekso.framework.run.stored_rules import literal, stored_rule
from tekso.tools.command_errors import UsageError
from tekso.tools.comparison import statistics
from tekso.tools.comparison.runs import (
    STEPS,
    Best,
    ComparedRun,
    Group,
    Point,
    schedules_differ,
)
from tekso.tools.sweeping.trials import ENDS

if TYPE_CHECKING:  # loads TensorFlow
    from tekso.framework.task import Goal

STEP, SEEN, SECONDS = "step", "seen", "seconds"
AXES: Mapping[str, Callable[[Point], float | None]] = {
    STEP: lambda point: point.step,
    SEEN: lambda point: point.seen,
    SECONDS: lambda point: point.seconds,
}
"""{name: the position of a point}: what is equal for all values that are compared."""

_EARLY_STOPPING = "run.early_stopping"
_TRAIN_LOSS = f"{TRAIN}/loss"
_MOST_NAMED = 3
_EARLY = 0.9  # a common step before this share of the earliest end hides too much of the curves
_Line = Mapping[float, float]  # {position: value}, in order


@dataclasses.dataclass(frozen=True)
class ComparedGroup:
    """The values of a group that are compared.

    Attributes:
      values: the runs with their values.
      diverged: the runs that diverged; their group has no mean.
    """

    values: Sequence[tuple[ComparedRun, float]]
    diverged: Sequence[ComparedRun]

    @property
    def tested(self) -> list[float]:
        """The values of a group in which no run diverged."""
        return [] if self.diverged else [value for _, value in self.values]


@dataclasses.dataclass(frozen=True)
class Alignment:
    """What is compared.

    Attributes:
      title: the metric and where: "dev/loss at step 40".
      groups: the values of each group.
      notes: sentences about runs that are left out, that diverged, or that end first.
    """

    title: str
    groups: Sequence[ComparedGroup]
    notes: Sequence[str]


def best_values(groups: Sequence[Group], metric: str, best: Best) -> Alignment:
    """Returns the best values of all runs, at whichever step."""
    found, notes = [], []
    for group in groups:
        points = [(run, run.best(metric, best)) for run in group.runs]
        values = [(run, point.value) for run, point in points if point is not None]
        diverged = [run for run, point in points if point is None and has_diverged(run, metric)]
        found.append(ComparedGroup(values, diverged))
        notes += _diverged_notes(group, found[-1], metric, "")
        for run, point in points:
            if point is None and run not in diverged:
                notes.append(f"{run.path} has no {metric}, and is left out.")
            elif point is not None and metric in run.not_finite:
                notes.append(
                    f"The last {metric} of {run.path} is not finite; the table has its best value, "
                    f"of step {point.step}."
                )
    return Alignment(f"best {metric} ({ENDS[best.goal]})", found, notes)


def equal_positions(groups: Sequence[Group], metric: str, axis: str | None = None) -> Alignment:
    """Returns the values at the last position that the compared runs have.

    Steps: the last one that they have in common, unless it is well before the earliest end.
    A run that ended before its last step is left out, unless fewer than two groups would be left.

    Args:
      groups: groups of runs.
      metric: name of the curve, "dev/loss".
      axis: one of `AXES`; None: the step, but groups of different `run.steps` are compared at
        their own ends if this is how they differ.

    Raises:
      UsageError: the runs do not have the axis.
    """
    if axis is not None or not any(group.by_steps for group in groups):
        return _aligned(groups, metric, axis or STEP)
    found = [_aligned([group], metric, STEP) for group in groups]
    notes = [
        f"The groups differ in {STEPS}, so each is compared at its own last step. --axis=step "
        "compares all at one."
    ]
    for group, one in zip(groups, found, strict=True):
        if one.groups[0].values:
            notes.append(f"{group.name}: {one.title}.")
        notes += one.notes
    return Alignment(f"{metric} at the end", [one.groups[0] for one in found], notes)


def _aligned(groups: Sequence[Group], metric: str, axis: str) -> Alignment:
    unit = _unit([run for group in groups for run in group.runs]) if axis == SEEN else ""
    lines = {run.path: _line(run, metric, axis) for group in groups for run in group.runs}
    usable = [
        [run for run in group.runs if lines[run.path] and not has_diverged(run, metric)]
        for group in groups
    ]
    at = _place([lines[run.path] for run in _deciding(usable)], axis)
    where, found, notes = _text(at, axis, unit), [], []
    late: list[ComparedRun] = []  # that begin later
    for group, own in zip(groups, usable, strict=True):
        values = []
        for run in group.runs:
            name = _named(run, group)
            if has_diverged(run, metric):
                continue
            if run not in own:
                what = f"{metric} with its {axis}" if run.curves.get(metric) else metric
                notes.append(f"{run.path} has no {what}, and is left out.")
            elif (value := _value(lines[run.path], at)) is None:
                begins = min(lines[run.path])
                why = f"{_end(run, metric)} and has no {metric} {where}"
                if begins > at:
                    why = f"has its first {metric} {_text(begins, axis, unit)}"
                    late.append(run)
                notes.append(f"{name} {why}: left out.")
            else:
                values.append((run, value))
                if axis == STEP and at not in lines[run.path]:
                    notes.append(f"{name} has no {metric} {where}: interpolated.")
        found.append(ComparedGroup(values, [r for r in group.runs if has_diverged(r, metric)]))
        notes += _diverged_notes(group, found[-1], metric, where)
    if axis != STEP and any(one.values for one in found):
        notes.append("Values between two points of a curve are interpolated linearly.")
    if late:
        notes += _overlaps([run for own in usable for run in own], metric, axis)
    notes += _first_ends(groups, found, lines, at, where)
    notes += _schedules([run for one in found for run, _ in one.values], where)
    return Alignment(f"{metric} {where}".rstrip(), found, notes)


def has_diverged(run: ComparedRun, metric: str) -> bool:
    """Returns whether a run ended with a metric, or a training, that was not finite."""
    return (
        metric in run.not_finite
        or run.is_not_finite
        or (_TRAIN_LOSS in run.not_finite and not _is_complete(run))
    )


def _deciding(usable: Sequence[Sequence[ComparedRun]]) -> list[ComparedRun]:
    """Returns the runs that have to have the position at which all are compared."""
    complete = [[run for run in own if _is_complete(run)] for own in usable]
    if sum(map(bool, complete)) < min(2, len(usable)):  # some groups are still training
        longest = [sorted(own, key=_last_step)[-1:] for own in usable]
        complete = [own or other for own, other in zip(complete, longest, strict=True)]
    return [run for own in complete for run in own]


def _place(lines: Sequence[_Line], axis: str) -> float:
    """Returns the last position that all lines have, or the earliest end; 0 for no lines."""
    end = min((max(line) for line in lines), default=0)
    common = set.intersection(*map(set, lines)) if lines and axis == STEP else set()
    last = max(common, default=end)
    return last if last >= _EARLY * end else end


def _line(run: ComparedRun, metric: str, axis: str) -> _Line:
    """Returns the values of a curve by their positions, in order."""
    points = ((AXES[axis](point), point.value) for point in run.curves.get(metric, ()))
    return dict(sorted({x: y for x, y in points if x is not None}.items()))


def _value(line: _Line, at: float) -> float | None:
    """Returns the value of a line at a position; None: it ends before, or begins after it."""
    if at in line:
        return line[at]
    xs = list(line)
    after = bisect.bisect_left(xs, at)
    if after in (0, len(xs)):
        return None
    left, right = xs[after - 1], xs[after]
    share = (at - left) / (right - left)
    return line[left] * (1 - share) + line[right] * share


def _last_step(run: ComparedRun) -> int:
    return max((points[-1].step for points in run.curves.values() if points), default=0)


def _is_complete(run: ComparedRun) -> bool:
    """Returns whether a run reached its last step, or was ended by early stopping."""
    steps = run.params[STEPS].text if STEPS in run.params else ""
    return not steps.isdigit() or _last_step(run) >= int(steps) or _ended_early(run)


def _ended_early(run: ComparedRun) -> bool:
    """Returns whether its evaluations are those at which early stopping ends a run."""
    params = {path: value.text for path, value in run.params.items()}
    patience = literal(params, f"{_EARLY_STOPPING}.patience") or 0
    if not patience:
        return False
    stored = stored_rule(params, "early_stopping", best_goal=run.goal)
    split, metric = stored.evaluation, f"{stored.evaluation}/{stored.metric}"
    steps = {p.step for key, points in run.curves.items() if _split(key) == split for p in points}
    values = {point.step: point.value for point in run.curves.get(metric, ())}
    history = [(step, values.get(step)) for step in sorted(steps)]  # None: it was not finite
    least = literal(params, f"{_EARLY_STOPPING}.min_improvement") or 0.0
    # If the goal is unknown, both are required: a metric that improves meets one of them.
    goals: Sequence[Goal] = ("min", "max") if stored.goal is None else (stored.goal,)
    rules = [EarlyStoppingRule(metric, goal, patience, least) for goal in goals]
    return all(rule.reason(history) for rule in rules)


def _split(curve: str) -> str:
    return curve.partition("/")[0]


def _unit(runs: Sequence[ComparedRun]) -> str:
    units = sorted({run.unit for run in runs} - {""})
    if len(units) == 1:
        return units[0]
    why = f"they count {' and '.join(units)}" if units else "no run counts tokens or examples"
    raise UsageError(f"--axis={SEEN} does not fit these runs: {why}")


# --- text ---


def _text(at: float, axis: str, unit: str) -> str:
    """Returns a position as text: "at step 40"."""
    if not at:
        return ""
    texts = {
        STEP: f"step {at:g}" if at < 1e6 else f"step {at:.0f}",
        SEEN: f"{magnitude(at)} {unit}",
    }
    return f"at {texts.get(axis) or duration(at)}"


def _named(run: ComparedRun, group: Group) -> str:
    return run.path if group.name == run.path else f"{run.path} ({group.name})"


def _end(run: ComparedRun, metric: str) -> str:
    steps = run.params[STEPS].text if STEPS in run.params else ""
    last = run.last(metric)
    of = f" of {steps}" if not _is_complete(run) else ""
    return f"ended at step {last.step if last else 0}{of}"


def _diverged_notes(group: Group, found: ComparedGroup, metric: str, where: str) -> list[str]:
    notes = []
    for run in found.diverged:
        why = f"its last {metric} is not finite"
        if metric in run.not_finite:
            why = why if run.curves.get(metric) else f"no {metric} of it is finite"
        else:
            why = "it ended with training steps that were not finite"
        notes.append(f"{_named(run, group)} diverged: {why}.")
    if found.diverged and found.values:
        one = statistics.summary([value for _, value in found.values])
        runs = "run has" if one.count == 1 else f"{one.count} runs have the mean"
        notes.append(
            f"{group.name} is not compared, because runs diverged; the other {runs} "
            f"{number(one.mean)}{f' {where}' if where else ''}."
        )
    return notes


def _overlaps(runs: Sequence[ComparedRun], metric: str, axis: str) -> list[str]:
    """Returns a sentence about another curve or axis by which all runs can be compared."""
    by_step = ("--axis=step", metric, STEP)
    for flag, curve, other in (by_step, (f"--metric={_TRAIN_LOSS}", _TRAIN_LOSS, axis)):
        lines = [_line(run, curve, other) for run in runs]
        if all(lines) and max(map(min, lines)) <= min(map(max, lines)):
            return [f"{flag} compares all of them."]
    return []


def _schedules(compared: Sequence[ComparedRun], where: str) -> list[str]:
    """Returns a warning about runs whose schedules end at different steps."""
    if not schedules_differ(compared):
        return []
    steps = {run.params[STEPS].text for run in compared if STEPS in run.params}
    texts = ", ".join(sorted(steps, key=lambda text: (len(text), text)))
    return [
        f"The runs have {STEPS}={texts}, with which their schedules end, so {where} their learning "
        "rates differ. Set total_steps of the schedules to compare them there."
    ]


def _first_ends(
    groups: Sequence[Group],
    found: Sequence[ComparedGroup],
    lines: Mapping[str, _Line],
    at: float,
    where: str,
) -> list[str]:
    """Returns a sentence about the runs that end first, if others go on."""
    used = [(run, g) for g, one in zip(groups, found, strict=True) for run, _ in one.values]
    ends = {run.path: max(lines[run.path]) for run, _ in used}
    first = [_named(run, group) for run, group in used if ends[run.path] == at]
    if len(first) == len(used):
        return []
    more = ", …" if len(first) > _MOST_NAMED else ""
    who = f"{', '.join(first[:_MOST_NAMED])}{more} {'ends' if len(first) == 1 else 'end'} there"
    why = who if first else "no later step is in all of them"
    return [f"The runs are compared {where}, although some go on: {why}."]
