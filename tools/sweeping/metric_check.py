"""Checks --metric of a sweep: before its first trial as far as possible, else by what that reports.

    before the first trial    figures of evaluations that are known without a run
    its first evaluation      other figures; those of decoding only if the name is a typo
    its end                   all other figures, and train/…

Some figures of decoding are reported only at the last step (see `Task.score`). A record of training
has the speed and the figures of a task only if steps of its time have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tekso.framework.run import metric_choice
from tekso.framework.run.metrics_log import SPLIT, STEP, TRAIN
from tekso.framework.spelling import close_matches
from tekso.framework.task import Goal
from tekso.tools.command_errors import UsageError
from tekso.tools.sweeping import value_checks


def check_split(metric: str | None, evaluations: Sequence[str]) -> None:
    """Checks that --metric is of an evaluation, or of training.

    Raises:
      UsageError: it is not.
    """
    split, slash, name = (metric or f"{TRAIN}/loss").partition("/")
    if not (slash and name and split in (*evaluations, TRAIN)):
        raise UsageError(
            f"--metric={metric}: expected evaluation/metric, as in dev/loss; the evaluations "
            f"are {', '.join(evaluations) or 'none'}, and {TRAIN}"
        )


def goal_of(tree: Any, metric: str) -> Goal:
    """Returns "min" or "max", as the task declares for --metric.

    Raises:
      UsageError: it does not declare it.
    """
    name = metric.partition("/")[2]
    if goal := metric_choice.declared_goal(tree, name):
        return goal
    raise UsageError(metric_choice.undeclared(tree, name, f"--metric={metric}:", "--goal"))


class MetricCheck:
    """Checks a metric.

    Args:
      metric: value of --metric, "evaluation/metric", or None.
      trees: the Params of trials.

    Raises:
      UsageError: no evaluation will report the metric.
    """

    def __init__(self, metric: str | None, trees: Iterable[Any]) -> None:
        self._metric = metric or ""
        self._split, _, self._name = self._metric.partition("/")
        self._is_known, self._decodes = not metric, False
        first, *others = itertools.islice(trees, value_checks.MOST_TREES)
        if self._is_known or self._split == TRAIN or self._name.endswith("_seconds"):
            return  # which records have without a task
        why = value_checks.unreported([first, *others], self._split, self._name)
        if why:
            raise UsageError(f"--metric={metric}: an evaluation of {self._split} {why}")
        self._is_known, self._decodes = why is not None, value_checks.decodes(first)

    def check(self, read: Callable[[], Sequence[Mapping[str, Any]]], *, is_over: bool) -> None:
        """Checks that a trial has reported the metric.

        Args:
          read: reads its records so far.
          is_over: whether it has trained all its steps.

        Raises:
          UsageError: it has not, and will not.
        """
        if self._is_known or (self._split == TRAIN and not is_over):
            return
        own = [record for record in read() if record[SPLIT] == self._split]
        self._is_known = any(self._name in record for record in own)
        if self._is_known or not own:
            return
        found = [
            name
            for record in own
            for name, value in record.items()
            if name not in (SPLIT, STEP) and not isinstance(value, Mapping)
        ]
        names = list(dict.fromkeys(found))
        close = close_matches(self._name, names, count=1)
        if is_over or not self._decodes or close:
            hint = f"; did you mean {self._split}/{close[0]}?" if close else ""
            what = "training" if self._split == TRAIN else f"an evaluation of {self._split}"
            raise UsageError(f"--metric={self._metric}: {what} reports {', '.join(names)}{hint}")
