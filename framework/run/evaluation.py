"""Evaluates one pass over a finite input by adding sums, so that every example counts once."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import error_advice, task_results, watchdog
from tekso.framework.batch_part import example_of
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.path_patterns import listed
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
    warn: Callable[[str], None] = logging.warning,
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
      warn: takes a warning about figures that are not finite.
      before_score: called between the pass and decoding.

    Raises:
      EvaluationError: the pass has no example with a weight above 0.
      StoppedError: `stopped` returned True.
    """
    figures = evaluate(program, task, batches, name=name, check=check, stopped=stopped, warn=warn)
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
    warn: Callable[[str], None] = logging.warning,
) -> dict[str, float]:
    """Returns the figures of a pass: the task's summary of the sums over all batches.

    Args:
      program: runs `eval_step`.
      task: summarises the sums.
      batches: batches of one pass.
      name: name of the evaluation, for errors.
      check: checks each batch; None: `check_batch` of the task does.
      stopped: called after every batch.
      warn: takes a warning about the first batch whose figures are not finite.

    Raises:
      EvaluationError: the pass has no example with a weight above 0.
      ValueError: the task rejects a batch, or a label is too large.
      StoppedError: `stopped` returned True.
    """
    sums: dict[str, tuple[float, float]] = {}
    check, is_finite = check or BatchCheck(task), True
    for number, batch in enumerate(batches):
        check(f"eval_inputs.{name}.batch({number})", batch)
        waited_for = f"batch {number} of the evaluation {name} on the devices"
        is_waiting = watchdog.waiting(waited_for, factor=watchdog.PREPARING)
        with error_advice.naming_ids({f"eval_inputs.{name}.batch({number})": batch}), is_waiting:
            for key, (value, weight) in program.eval_step(batch).items():
                before = sums.get(key, (0.0, 0.0))
                sums[key] = (before[0] + float(value), before[1] + float(weight))
        if is_finite and (wrong := [key for key, pair in sums.items() if not _is_finite(pair)]):
            is_finite = False
            warn(_not_finite(f"eval_inputs.{name}.batch({number})", batch, wrong))
        if stopped():
            raise StoppedError
    if not sums.get(LOSS, (0.0, 0.0))[1]:
        raise EvaluationError(
            f"eval_inputs.{name} has no example with a weight above 0: is its data empty, or does "
            "loss_weight exclude all of it?"
        )
    return task_results.summarize(task, sums)


def _is_finite(pair: tuple[float, float]) -> bool:
    return all(map(math.isfinite, pair))


def _not_finite(what: str, batch: Mapping[str, Any], figures: Sequence[str]) -> str:
    """Returns the warning about a batch of an evaluation whose figures are not finite."""
    are = "is" if len(figures) == 1 else "are"
    text = f"{listed(figures)} of {what} {are} not finite"
    for name, array in batch.items():
        numbers = np.asarray(array)
        if numbers.dtype.kind not in "fc" or np.isfinite(numbers).all():
            continue
        place = tuple(np.argwhere(~np.isfinite(numbers))[0].tolist())
        example = example_of(batch, place[0])
        return f"{text}: {name!r} (example {example} of {what}) has {numbers[place]}"
    return (
        f"{text}, although the arrays of the batch are finite. Look for a logarithm or a root of a "
        "number that is not above 0, a division by 0, or an overflow"
    )
