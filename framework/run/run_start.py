"""Finds out from its Params and its logdir how a run would start, without building its program.

Each check is the code with which training finds the same problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tekso.framework import files
from tekso.framework.experiment import Tree
from tekso.framework.run import initial_weights, input_globs, param_changes, restore
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints
from tekso.framework.run.job import checkpoints_of
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metric_choice import metric_of
from tekso.framework.state import State
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class RunStart:
    """How a run would start.

    Attributes:
      resumes_from: step of the checkpoint that it would restore; None: a new run.
      checkpoints: number of checkpoints in the logdir, without damaged ones that are newer.
      best: number of checkpoints that are kept in addition to the last ones.
      problems: why it cannot start.
      warnings: of damaged checkpoints that it skips.
      changes: differences of the Params from those of the checkpoint, a line for each.
    """

    resumes_from: int | None
    checkpoints: int
    best: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    changes: tuple[str, ...]


def params_problems(tree: Tree.Params) -> list[str]:
    """Returns which Params of the inputs and of the run are invalid."""

    def check_input(params: Any) -> None:
        params.owner.check_params(params)

    checks: list[tuple[Callable[[Any], object], Any]] = [
        (lambda params: params.instantiate(), tree.run),
        *((check_input, params) for params in (tree.input, *tree.eval_inputs.values())),
    ]
    found = []
    for check, params in checks:
        try:
            check(params)
        except ValueError as error:
            found.append(str(error))
    return found


def missing_files(tree: Tree.Params) -> list[str]:
    """Returns which globs of the inputs match no file, in fields such as `files`; reads no data."""
    found: list[str] = []
    for path, value in input_globs.of_inputs(tree).items():
        try:
            files.glob(value, what=path)
        except OSError as error:
            found.append(str(error))
    return found


def find(tree: Tree.Params, state: State[WeightSpec], place: Logdir) -> RunStart:
    """Returns how a run would start; writes nothing.

    Args:
      tree: the Params.
      state: specs of the weights and of the state of the learner.
      place: the logdir, which may not exist.
    """
    problems = list(filter(None, [place.problem()]))
    warnings: list[str] = []
    try:
        kept = checkpoints_of(Checkpoints, tree, place, warn=warnings.append)
        best = tree.run.keep_best.count if metric_of(tree, "keep_best") else 0
        best += len(kept.earlier_best())
    except ValueError:  # the metric or a number is invalid, which is no question of the logdir
        kept, best = Checkpoints(place.checkpoints, warn=warnings.append), 0
    warnings.clear()  # those of the ranking: training prints them
    steps = kept.steps()
    try:
        checkpoint = kept.newest_good(unread=True)
    except CheckpointError as error:
        problems.append(str(error))
        return RunStart(None, len(steps), best, tuple(problems), (), ())
    if checkpoint is None:
        why = initial_weights.problem(state.weights, tree.run.warm_start, assets=place.assets)
        problems += [why] if why else []
        return RunStart(None, len(steps), best, tuple(problems), tuple(warnings), ())
    step = checkpoint.step
    changes = param_changes.since(checkpoint.description, tree)
    if step <= tree.run.steps:  # otherwise there is nothing to do
        why = restore.problem(state.keyed(), checkpoint)
        problems += [why] if why else []
    checkpoint.release()
    there = sum(one <= step for one in steps)
    return RunStart(step, there, best, tuple(problems), tuple(warnings), tuple(changes))
