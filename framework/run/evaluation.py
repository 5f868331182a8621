"""Evaluates one pass over a finite input by adding sums, so that every example counts once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tekso.framework import error_advice, task_results, watchdog
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.run.label_limits import BatchCheck
from tekso.framework.task import LOSS, Scored, Task

Stopped = Callable[[], bool]
"""Called regularly; returns whether to stop."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
      figures: figures of the pass and of decoding.
      scored: decoded outputs and their figures; None if the task decodes nothing.
    """

    figures: dict[str, float]
    scored: Scored | None


class EvaluationError(ValueError):
    """An evaluation input cannot be evaluated."""


class StoppedError(Exception):
    """The evaluation was stopped before its end."""


def evaluate_and_score(
    program: ExecutionProgram,
    task: Task,
    batches: Iterator[Mapping[str, Any]],
    score: Callable[[Stopped], Scored | None],
    *,
    name: str,
    check: BatchCheck | None = None,
    stopped: Stopped = lambda: False,
    before_score: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Returns the figures of a pass and of `Task.score`.

    Args:
      program: runs `eval_step`.
      task: summarises the sums.
      batches: batches of one pass.
      score: decodes the evaluation input like `task_results.score`; its argument is `stopped`.
      name: name of the evaluation, for errors.
      check: checks each batch; None: `check_batch` of the task does.
      stopped: called after every batch, while decoding and at the end.
      before_score: called between the pass and decoding.

    Raises:
      EvaluationError: the pass has no example with a weight above 0.
      StoppedError: `stopped` returned True.
    """
    figures = evaluate(program, task, batches, name=name, check=check, stopped=stopped)
    before_score()
    scored = score(stopped)
    if stopped():
        raise StoppedError
    return Evaluation(figures | (scored.figures if scored is not None else {}), scored)


def flat(evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the figures of evaluations as {"evaluation/metric": value}."""
    return {
        f"{name}/{metric}": value
        for name, values in evaluations.items()
        for metric, value in values.items()
    }


def step_figures(task: Task, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a training step for the report; waits until they are computed."""
    return task_results.summarize(
        task, {name: (float(value), 1.0) for name, value in metrics.items()}
    )


def evaluate(
    program: ExecutionProgram,
    task: Task,
    batches: Iterator[Mapping[str, Any]],
    *,
    name: str,
    check: BatchCheck | None = None,
    stopped: Stopped = lambda: False,
) -> dict[str, float]:
    """Returns the figures of a pass: the task's summary of the sums over all batches.

    Args:
      program: runs `eval_step`.
      task: summarises the sums.
      batches: batches of one pass.
      name: name of the evaluation, for errors.
      check: checks each batch; None: `check_batch` of the task does.
      stopped: called after every batch.

    Raises:
      EvaluationError: the pass has no example with a weight above 0.
      ValueError: the task rejects a batch, or a label is too large.
      StoppedError: `stopped` returned True.
    """
    sums: dict[str, tuple[float, float]] = {}
    check = check or BatchCheck(task)
    for number, batch in enumerate(batches):
        check(f"eval_inputs.{name}.batch({number})", batch)
        waited_for = f"batch {number} of the evaluation {name} on the devices"
        is_waiting = watchdog.waiting(waited_for, factor=watchdog.PREPARING)
        with error_advice.naming_ids({f"eval_inputs.{name}.batch({number})": batch}), is_waiting:
            for key, (value, weight) in program.eval_step(batch).items():
                before = sums.get(key, (0.0, 0.0))
                sums[key] = (before[0] + float(value), before[1] + float(weight))
        if stopped():
            raise StoppedError
    if not sums.get(LOSS, (0.0, 0.0))[1]:
        raise EvaluationError(
            f"eval_inputs.{name} has no example with a weight above 0: is its data empty, or does "
            "loss_weight exclude all of it?"
        )
    return task_results.summarize(task, sums)
