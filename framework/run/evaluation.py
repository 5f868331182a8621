"""Evaluation: one pass over a finite input, as sums, so that every example counts once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tekso.framework import task_results
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.task import LOSS, Scored, Task

Stopped = Callable[[], bool]
"""Asked now and then whether to leave off."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
      figures: those of the pass, and those of decoding.
      scored: what decoding shows besides; None if the task decodes nothing.
    """

    figures: dict[str, float]
    scored: Scored | None


class EvaluationError(ValueError):
    """An input cannot be evaluated on."""


class StoppedError(Exception):
    """The evaluation was asked to stop in the middle."""


def evaluate_and_score(
    program: ExecutionProgram,
    task: Task,
    batches: Iterator[Mapping[str, Any]],
    score: Callable[[Stopped], Scored | None],
    *,
    name: str,
    stopped: Stopped = lambda: False,
    before_score: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Returns the figures of a pass and of `Task.score`.

    Args:
      program: runs `eval_step`.
      task: summarises.
      batches: of one pass.
      score: decodes the evaluation input, as `task_results.score` does; takes `stopped`.
      name: of the evaluation, for errors.
      stopped: asked after every batch, while decoding and at the end.
      before_score: called between the pass and decoding.

    Raises:
      EvaluationError: the pass has no example that counts.
      StoppedError: `stopped` said so.
    """
    figures = evaluate(program, task, batches, name=name, stopped=stopped)
    before_score()
    scored = score(stopped)
    if stopped():
        raise StoppedError
    return Evaluation(figures | (scored.figures if scored is not None else {}), scored)


def step_figures(task: Task, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a training step, as they are reported; waits for them."""
    return task_results.summarize(
        task, {name: (float(value), 1.0) for name, value in metrics.items()}
    )


def evaluate(
    program: ExecutionProgram,
    task: Task,
    batches: Iterator[Mapping[str, Any]],
    *,
    name: str,
    stopped: Stopped = lambda: False,
) -> dict[str, float]:
    """Returns the figures of a pass: the task's summary of the sums over all batches.

    Args:
      program: runs `eval_step`.
      task: checks the batches, and summarises.
      batches: of one pass.
      name: of the evaluation, for errors.
      stopped: asked after every batch whether to go on.

    Raises:
      EvaluationError: the pass has no example that counts.
      ValueError: the task refuses a batch.
      StoppedError: `stopped` said so.
    """
    sums: dict[str, tuple[float, float]] = {}
    for number, batch in enumerate(batches):
        task.check_batch(f"eval_inputs.{name}.batch({number})", batch)
        for key, (value, weight) in program.eval_step(batch).items():
            before = sums.get(key, (0.0, 0.0))
            sums[key] = (before[0] + float(value), before[1] + float(weight))
        if stopped():
            raise StoppedError
    if not sums.get(LOSS, (0.0, 0.0))[1]:
        raise EvaluationError(f"eval_inputs.{name} has no example that counts: is its data empty?")
    return task_results.summarize(task, sums)
