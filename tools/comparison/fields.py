"""Which of the Params that differ a comparison shows, and why a run has no value of a field."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tekso.tools.comparison.runs import DEFAULT, ComparedRun, DifferentField

_REFERENCE = re.compile(r'Params\("[\w.]+:([\w.]+)"\)')
_LONGEST = 30  # characters of a value that is named
_MOST_REPEATED = 4  # runs whose values are listed in the order of the runs
_MOST_NAMED = 2  # runs of a value


def to_show(
    different: Sequence[DifferentField], runs: Sequence[ComparedRun]
) -> list[DifferentField]:
    """Returns the fields without those that follow from another one.

    If runs have different optimizers, only some have a field `beta1`: the field of the optimizer
    shows that. Fields of which a run has set its own value are shown anyway.

    Args:
      different: the fields that differ.
      runs: the runs, in the order of the values.
    """
    return [field for field in different if not _follows(field, runs)]


def why_missing(path: str, run: ComparedRun) -> str:
    """Returns why a run has no value of a field: "AdamW has no such field"."""
    above = _above(path, run)
    text = run.params[above].text if above in run.params else ""
    if (found := _REFERENCE.fullmatch(text)) is not None:
        return f"{found[1]} has no such field"
    return f"{above} is {text}" if 0 < len(text) <= _LONGEST else "no such field"


def _follows(field: DifferentField, runs: Sequence[ComparedRun]) -> bool:
    if any(value is not None and value.origin != DEFAULT for value in field.values):
        return False
    missing = [run for run, value in zip(runs, field.values, strict=True) if value is None]
    above = {_above(field.path, run) for run in missing}
    texts = [{run.params[path].text for run in runs if path in run.params} for path in above]
    return any(len(of_path) > 1 for of_path in texts)


def _above(path: str, run: ComparedRun) -> str:
    """Returns the nearest field above a field that a run has."""
    while (end := max(path.rfind("."), path.rfind("["))) > 0:
        path = path[:end]
        if path in run.params:
            return path
    return "."


def line(field: DifferentField, runs: Sequence[ComparedRun]) -> str:
    """Returns the values of a field as a line; of many runs, each value once, with its runs."""
    texts = [
        value.with_origin if value else f"({why_missing(field.path, run)})"
        for run, value in zip(runs, field.values, strict=True)
    ]
    if len(runs) > _MOST_REPEATED:
        paths: dict[str, list[str]] = {}
        for text, run in zip(texts, runs, strict=True):
            paths.setdefault(text, []).append(run.path)
        texts = [f"{text} ({_listed(members)})" for text, members in paths.items()]
    return f"{field.path} : {' | '.join(texts)}"


def _listed(paths: Sequence[str]) -> str:
    if len(paths) <= _MOST_NAMED:
        return ", ".join(paths)
    return f"{', '.join(paths[:_MOST_NAMED])} and {len(paths) - _MOST_NAMED} more"
