"""Checks the values of a sweep without data, before the first trial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tekso.framework.user_mistakes import MistakeError
from tekso.tools.sweeping.space import Varied

_MOST_COMBINATIONS = 64
MOST_TREES = 8
"""Trees of a sweep that are looked at."""

Check = Callable[[Any], object]
"""Raises an error if a part of an experiment rejects its Params."""


def checks_of(tree: Any) -> list[Check]:
    """Returns the checks that pass for the Params of a sweep without the settings that it varies.

    The task is not among them if only the data determines its sizes.
    """
    checks: list[Check] = [_check_batch_sizes, _check_learner, _check_execution, _check_task]
    return [check for check in checks if not _reason(tree, [check])]


def rejection(
    tree_of: Callable[[Mapping[str, str]], Any],
    settings: Mapping[str, str],
    others: Sequence[Varied],
    checks: Sequence[Check],
) -> str:
    """Returns why an experiment rejects settings; "" if it accepts them.

    Values may fit each other only: the settings are accepted if they fit one combination of the
    values of the other settings.

    Args:
      tree_of: returns the Params with settings.
      settings: the settings, {path: text}.
      others: the other settings that vary; of many combinations, some are tried.
      checks: what is checked.
    """
    first = ""
    combinations = itertools.product(*(one.examples for one in others))
    for values in itertools.islice(combinations, _MOST_COMBINATIONS):
        more = dict(zip((one.path for one in others), values, strict=True))
        reason = _reason(tree_of({**settings, **more}), checks)
        if not reason:
            return ""
        first = first or reason
    return first


def unreported(trees: Iterable[Any], evaluation: str, metric: str) -> str | None:
    """Returns what evaluations report if a metric is not among it for any of the Params, or "".

    A figure of decoding must be declared in the `goals` of the task. None: it is unknown, because
    the evaluation changes the batches of training.

    Args:
      trees: the Params of trials; of many, some are tried.
      evaluation: name of the evaluation input.
      metric: name of the metric, without the evaluation.
    """
    from tekso.framework.run import experiment_record, inspection, metric_names

    why = ""
    for tree in itertools.islice(trees, MOST_TREES):
        try:
            tree, task, _ = experiment_record.completed(tree)  # the names depend on no size
            if metric_names.is_declared(task, metric):
                return ""
            if not metric_names.is_like_training(tree, evaluation):
                return None
            batch = inspection.batch_of(tree)
            why = metric_names.unreported(task, metric, batch, undeclared="rejected")
        except Exception:  # the trial itself will say what is wrong
            return None
        if not why:
            return ""
    return why


def decodes(tree: Any) -> bool:
    """Returns whether evaluations may report figures of decoding, some only at the last step."""
    from tekso.framework.task import Task

    return bool(tree.task.owner.score is not Task.score)


def _reason(tree: Any, checks: Sequence[Check]) -> str:
    for check in checks:
        try:
            check(tree)
        except (ValueError, TypeError, MistakeError) as error:
            return " ".join(str(error).split())
    return ""


def _check_learner(tree: Any) -> None:
    from tekso.framework import schedules

    schedules.end_with_run(tree.learner, tree.run.steps).instantiate()


def _check_execution(tree: Any) -> None:
    from tekso.framework.run import batch_kinds

    batch_kinds.execution_of(tree)


def _check_task(tree: Any) -> None:
    from tekso.framework.run import inspection

    inspection.task_of(tree).specs()


def _check_batch_sizes(tree: Any) -> None:
    """Checks the batch sizes of all inputs, which are opened with their data only.

    Raises:
      ValueError: one is less than 1.
    """

    def check(path: str, value: Any, field: Any) -> None:
        name = path.rpartition(".")[2]
        is_input = path.startswith(("input.", "eval_inputs."))
        if name == "batch_size" and is_input and isinstance(value, int) and value < 1:
            raise ValueError(f"{path} is {value}, but must be at least 1")

    tree.visit(check)
