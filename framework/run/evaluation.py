"""Evaluation: one pass over a finite input, as sums, so that every example counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tekso.framework import task_results
from tekso.framework.task import LOSS


class EvaluationError(ValueError):
    """An input cannot be evaluated on."""


class StoppedError(Exception):
    """The evaluation was asked to stop in the middle."""


def evaluate(
    program: Any,
    task: Any,
    batches: Iterator[Mapping[str, Any]],
    *,
    name: str,
    stopped: Callable[[], bool] = lambda: False,
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
