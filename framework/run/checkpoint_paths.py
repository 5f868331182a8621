"""Paths of checkpoints by name: the last or best one of a run, or the one of a step.

    runs/bytes/last    runs/bytes/best    runs/bytes/2000    runs/bytes/step_00002000

A file or folder that exists under such a path comes first. Nothing of the run is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from tekso.framework import files
from tekso.framework.run.checkpoint_description import Description, describe
from tekso.framework.run.checkpoint_errors import CheckpointError, DamagedCheckpointError
from tekso.framework.run.ranking import Ranking
from tekso.framework.run.stored_rules import stored_rule, texts

LAST, BEST = "last", "best"
FOLDER, STEP = "checkpoints", "step_"
"""Folder of the checkpoints in a run, and the prefix of their names."""


def split(path: str) -> tuple[str, str | None]:
    """Returns the run and the name of a checkpoint; the path itself and None without a name."""
    path = os.path.expanduser(os.fspath(path)).rstrip("/") or "/"
    folder, _, name = path.rpartition("/")
    run = folder.removesuffix(f"/{FOLDER}")
    is_name = name in (LAST, BEST) or step_of(name) is not None
    if not run or not is_name or files.exists(path) or not files.exists(files.join(run, FOLDER)):
        return path, None
    return run, name


def step_of(name: str) -> int | None:
    """Returns the step of "2000" or "step_00002000"; None for another name."""
    number = name.removeprefix(STEP)
    return int(number) if number.isascii() and number.isdigit() else None


def named(name: str, steps: Mapping[int, str]) -> str:
    """Returns the path of the checkpoint that a name means.

    Args:
      name: "last", "best", or a step.
      steps: {step: path} of the complete checkpoints of a run, in ascending order; not empty.

    Raises:
      CheckpointError: there is no checkpoint of the step, or it is unknown which one is best.
    """
    there = ", ".join(f"{STEP}{step:08d}" for step in steps)
    if name == LAST:
        return steps[max(steps)]
    if name == BEST:
        return _best(steps, there)
    if (step := step_of(name)) in steps:
        return steps[step or 0]
    raise CheckpointError(f"there is no checkpoint of step {step}; there are: {there}")


def _best(steps: Mapping[int, str], there: str) -> str:
    newest = _newest(steps)
    if newest is None:
        raise CheckpointError(f"all checkpoints are damaged: {there}")
    metric, goal = _rule(newest)
    ranking = Ranking(metric, goal)
    ranking.read(steps)
    step = ranking.best()
    if step is None:
        raise CheckpointError(f"{ranking.why_no_best()}; there are: {there}")
    return steps[step]


def _newest(steps: Mapping[int, str]) -> Description | None:
    """Returns the description of the newest checkpoint with one that can be read."""
    for step in sorted(steps, reverse=True):
        try:
            return describe(steps[step])
        except DamagedCheckpointError:
            continue
    return None


def _rule(newest: Description) -> tuple[str, Literal["min", "max"]]:
    """Returns "evaluation/metric" of `run.keep_best`, and its goal.

    It reads the text of Params and resolves no class in it. The description has the goal that the
    class of the task declares.
    """
    stored = stored_rule(texts(newest.params), "keep_best", best_goal=newest.goal)
    if stored.goal is None:
        raise CheckpointError(
            "the best checkpoint is unknown: the checkpoints are of an earlier version, which did "
            f"not store whether larger values of {stored.metric} are better, and this command "
            "imports no classes. Give the step instead"
        )
    return f"{stored.evaluation}/{stored.metric}" if stored.evaluation else "", stored.goal
