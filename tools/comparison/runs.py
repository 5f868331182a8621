"""Reads what a comparison needs of a run: Params with origins, records, samples.

Only text files of the logdir are read, so the packages of its classes are not needed.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.exit_codes import ExitCode
from tekso.framework.run import missing_run, time_use
from tekso.framework.run.logdir import PARAMS, DamagedParamsError, Logdir
from tekso.framework.run.metrics_log import SECONDS, SEEN, SPLIT, STEP, TRAIN, MetricsLog
from tekso.tools.command_errors import UsageError
from tekso.tools.comparison import group_names, newest_checkpoint, samples
from tekso.tools.comparison.newest_checkpoint import DEVICES
from tekso.tools.sweeping.trials import TRIALS, exit_code_of

SEED = "run.seed"
STEPS = "run.steps"
_LINE = re.compile(r"(.+?) : (.*?)(?:  # ([^\"']*))?")
_LENGTH = {  # fields that say for how long a run goes, not what is trained
    STEPS,
    "run.log_every_steps",
    "run.eval_every_steps",
    "run.checkpoint_every_steps",
    "run.keep_last_checkpoints",
    "run.checkpoint_buffer_mb",
    "run.decode_at_end",
    "run.weight_figures_every_steps",
}
_END = ".total_steps"  # of a decay; if it is not set, it is `run.steps`
DEFAULT = "default"
"""The origin of a value that nothing sets."""


@dataclasses.dataclass(frozen=True)
class ParamValue:
    """The text of a value of Params, and where it was set."""

    text: str
    origin: str

    @property
    def with_origin(self) -> str:
        """The value, and the place that set it unless it is a default."""
        return self.text if self.origin == DEFAULT else f"{self.text} [{self.origin}]"


@dataclasses.dataclass(frozen=True)
class Point:
    """A value of a curve.

    Attributes:
      step: steps done.
      seen: tokens, examples or other units that training has processed; None: not recorded.
      seconds: time of the run so far, over all its processes; None: not recorded.
      value: the value.
    """

    step: int
    seen: float | None
    seconds: float | None
    value: float


@dataclasses.dataclass(frozen=True)
class Best:
    """Says that the best value of each run is compared, instead of the last one.

    Attributes:
      goal: "min" or "max": whether the smallest or the largest value is best.
      ends: {name of a logdir: last step whose values count}; in other runs, all count.
    """

    goal: str
    ends: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run to compare.

    Attributes:
      path: its logdir.
      model: key of its experiment.
      params: {path: value}; and "devices", if the run has a checkpoint.
      curves: {"split/metric": its points}, without values that are not finite.
      not_finite: the names of the curves whose last value is not finite.
      unit: the unit of `Point.seen`, such as "tokens"; "": not recorded.
      seconds: the time of the run by activity; {}: not recorded.
      samples: {name: decoded text}: samples.txt, and the newest text of every evaluation.
      damage: what is wrong with its metrics.jsonl; "": nothing.
      is_not_finite: whether it is a trial of a sweep that ended because steps were not finite.
      goal: "min" or "max", of the metric of `run.keep_best`; "": unknown.
    """

    path: str
    model: str
    params: Mapping[str, ParamValue]
    curves: Mapping[str, Sequence[Point]]
    not_finite: frozenset[str]
    unit: str
    seconds: Mapping[str, float]
    samples: Mapping[str, str]
    damage: str = ""
    is_not_finite: bool = False
    goal: str = ""

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return self.params[SEED].text if SEED in self.params else "?"

    def last(self, curve: str) -> Point | None:
        """Returns the last point of a curve; None if there is none."""
        points = self.curves.get(curve)
        return points[-1] if points else None

    def best(self, curve: str, best: Best) -> Point | None:
        """Returns the best point of a curve that counts; None if there is none."""
        end = best.ends.get(os.path.basename(self.path), math.inf)
        points = [point for point in self.curves.get(curve, ()) if point.step <= end]
        pick = min if best.goal == "min" else max
        return pick(points, key=lambda point: point.value, default=None)


def read(path: str) -> ComparedRun:
    """Reads a run.

    Raises:
      UsageError: the folder has no run.
      DamagedParamsError: its params.txt is incomplete or damaged.
    """
    logdir = Logdir(os.path.expanduser(path))
    model = logdir.model()
    if model is None:
        hint = ""
        if files.is_folder(logdir.file(TRIALS)):
            hint = f"; it is a sweep, whose runs are {logdir.file(TRIALS)}/*"
        why = missing_run.reason(logdir.path)
        if hint or not why:
            why = f"there is no {logdir.file(PARAMS)}{hint}"
        raise UsageError(f"{path} has no run: {why}")
    records = MetricsLog(logdir.metrics).read()
    unit = next((key for r in records for key in r if key.endswith(SEEN)), "").removesuffix(SEEN)
    spent = map(_last_seconds, (records, MetricsLog(logdir.progress).read()))
    return ComparedRun(
        path=logdir.path,
        model=model,
        params={**_params(logdir.file(PARAMS)), **_devices(logdir)},
        curves=curves_of(records, unit),
        not_finite=_not_finite(records),
        unit=unit,
        seconds=max(spent, key=lambda one: math.fsum(one.values())),
        samples=samples.read(logdir),
        damage=_damage(logdir.metrics),
        is_not_finite=exit_code_of(logdir.path) == ExitCode.NOT_FINITE,
        goal=newest_checkpoint.goal(logdir),
    )


def _devices(logdir: Logdir) -> dict[str, ParamValue]:
    found = newest_checkpoint.devices(logdir)
    return {DEVICES: ParamValue(found, DEFAULT)} if found else {}


def _damage(path: str) -> str:
    """Returns what is wrong with a metrics.jsonl, and what is left out; "": nothing."""
    if not files.exists(path):
        return f"{path} is missing"
    if not (found := MetricsLog(path).left_out()):
        return "" if MetricsLog(path).read() else f"{path} is empty"
    some = ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")
    lines = "line" if len(found) == 1 else f"{len(found)} lines:"
    verb = "is" if len(found) == 1 else "are"
    return f"{path} is damaged in {lines} {some}, which {verb} left out"


def _last_seconds(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the time by activity in the last record that has it; {} if none has."""
    spent = (one for r in reversed(records) if isinstance(one := r.get(SECONDS), dict))
    return time_use.valid(next(spent, {}))


def _params(path: str) -> dict[str, ParamValue]:
    """Returns {path: value} of a params.txt.

    A file that was cut after a whole line of `run` cannot be distinguished from one with fewer.

    Raises:
      DamagedParamsError: a line cannot be read, or the end is missing.
    """
    text = bounded.read(path).decode("utf-8", "replace")
    lines = text.split("\n")
    cure = "restore it from a copy, or train the run with its command in command.txt again"
    for number, line in enumerate(lines, start=1):
        is_cut = number == len(lines) and line  # the last line has no end
        if is_cut or (line.strip() and not line.startswith("#") and not _LINE.fullmatch(line)):
            what = "is incomplete: it ends within" if number == len(lines) else "is damaged in"
            raise DamagedParamsError(f"{path} {what} line {number}, {line[:80]!r}: {cure}")
    found = params_of(text)
    if SEED not in found:
        raise DamagedParamsError(
            f"{path} is incomplete: it has no {SEED}; its last line is {len(lines) - 1}: {cure}"
        )
    return found


def params_of(text: str) -> dict[str, ParamValue]:
    """Returns {path: value} of the text of Params with origins."""
    found = (_LINE.fullmatch(line) for line in text.split("\n"))
    return {
        match[1]: ParamValue(match[2], match[3] or DEFAULT)
        for match in found
        if match is not None and not match[1].startswith("#")
    }


def curves_of(records: Sequence[Mapping[str, Any]], unit: str) -> dict[str, list[Point]]:
    """Returns {"split/metric": points}.

    A record without units, such as that of an evaluation, has those of its step between the two
    nearest records that have them.
    """
    curves: dict[str, list[Point]] = {}
    seen_at = _seen_at(records, unit)
    for record in records:
        seen = seen_at(record[STEP])
        spent = record.get(SECONDS)
        seconds = math.fsum(time_use.valid(spent).values()) if isinstance(spent, dict) else None
        for name, value in record.items():
            if name in (STEP, SPLIT, SECONDS, "elapsed_seconds", f"{unit}{SEEN}"):
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                key = f"{record[SPLIT]}/{name}"
                curves.setdefault(key, []).append(Point(record[STEP], seen, seconds, value))
    return curves


def _seen_at(records: Sequence[Mapping[str, Any]], unit: str) -> Callable[[int], float | None]:
    """Returns a function of the step: the units that training has processed; None: unknown."""
    key = f"{unit}{SEEN}"
    known: dict[int, float] = {
        record[STEP]: float(value)
        for record in records
        if record[STEP] > 0
        and isinstance(value := record.get(key), int | float)
        and math.isfinite(value)
    }
    steps: list[int] = [0, *sorted(known)]
    units: list[float] = [0.0, *(known[step] for step in steps[1:])]

    def seen(step: int) -> float | None:
        if not known:
            return None
        if step > steps[-1]:  # as many per step as before
            return units[-1] * step / steps[-1]
        after = max(1, bisect.bisect_left(steps, step))
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return units[after - 1] + (units[after] - units[after - 1]) * share

    return seen


def _not_finite(records: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Returns the names of the curves whose last value is null, which stands for NaN and inf."""
    last = {f"{record[SPLIT]}/{name}": record[name] for record in records for name in record}
    return frozenset(name for name, value in last.items() if value is None)


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs whose Params differ in the seed only.

    Attributes:
      name: the settings in which the groups differ, or the path of the run.
      runs: its runs.
      by_steps: whether the groups differ in `run.steps`, and this is compared.
    """

    name: str
    runs: Sequence[ComparedRun]
    by_steps: bool = False


@dataclasses.dataclass(frozen=True)
class DifferentField:
    """A field of Params whose value is not the same in all runs.

    Attributes:
      path: path of the field.
      values: the value in each run; None: the run does not have the field.
    """

    path: str
    values: Sequence[ParamValue | None]


def differences(runs: Sequence[ComparedRun]) -> list[DifferentField]:
    """Returns the fields that differ, in the order of the Params."""
    paths = dict.fromkeys(path for run in runs for path in run.params)
    found = []
    for path in paths:
        values = [run.params.get(path) for run in runs]
        if path == DEVICES and None in values:  # unknown
            continue
        if len({value.text if value else None for value in values}) > 1:
            found.append(DifferentField(path, values))
    return found


def groups(runs: Sequence[ComparedRun]) -> list[Group]:
    """Returns the runs in groups whose Params differ in the seed only, in order.

    If runs with the same seed differ in their number of steps or their devices only, these are
    compared, so they make groups too. So do numbers of steps with which a schedule ends.
    """
    different = [d for d in differences(runs) if d.path not in {SEED, DEVICES, *_LENGTH}]
    found = _equal(runs, different)
    for path in (STEPS, DEVICES):
        pairs = [{(r.seed, _text(r, path)) for r in one} for one in found.values()]
        repeats = any(len({seed for seed, _ in one}) < len(one) for one in pairs)
        if repeats or (path == STEPS and any(map(schedules_differ, found.values()))):
            different += [d for d in differences(runs) if d.path == path]
            found = _equal(runs, different)
    common = [one for one in different if None not in one.values]  # fields that all runs have
    names = _names(_equal(runs, common), common) if common else []
    if len(names) < len(found):  # they do not distinguish all groups
        names = _names(found, different)
    result = []
    by_steps = any(one.path == STEPS for one in different)
    for name, members in zip(names, found.values(), strict=True):
        alone = members[0].path if len(found) > 1 else members[0].model
        name = name if names.count(name) == 1 else ""
        result.append(Group(name or alone, members, by_steps))
    return result


def _names(found: Mapping[Any, Any], different: Sequence[DifferentField]) -> list[str]:
    return group_names.names(list(found), [one.path for one in different])


def schedules_differ(runs: Sequence[ComparedRun]) -> bool:
    """Returns whether runs have different numbers of steps, with which a schedule of one ends."""
    return len({_text(run, STEPS) for run in runs}) > 1 and any(
        path.startswith("learner.") and path.endswith(_END) and value.text == "REQUIRED"
        for run in runs
        for path, value in run.params.items()
    )


def _text(run: ComparedRun, path: str) -> str:
    return run.params[path].text if path in run.params else "?"


def _equal(
    runs: Sequence[ComparedRun], different: Sequence[DifferentField]
) -> dict[Any, list[ComparedRun]]:
    """Returns the runs by their experiment and their values of fields, in order."""
    found: dict[Any, list[ComparedRun]] = {}
    for i, run in enumerate(runs):
        values = (one.values[i] for one in different)
        key = (run.model, *(value.text if value else None for value in values))
        found.setdefault(key, []).append(run)
    return found


def main_metric(runs: Sequence[ComparedRun]) -> str:
    """Returns the curve to compare by default: of the first evaluation, or else the loss.

    It is one that all runs have, if there is one.
    """
    splits = dict.fromkeys(key.partition("/")[0] for run in runs for key in run.curves)
    split = next((one for one in splits if one != TRAIN), TRAIN)
    names = [f"{split}/{name}" for name in ("bits_per_byte", "loss")]
    for has in (all, any):
        for name in names:
            if has(name in run.curves for run in runs):
                return name
    return f"{TRAIN}/loss"
