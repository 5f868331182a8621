"""The pieces of a task, after a check that no subclass changes only what other executions run."""

from __future__ import annotations

from typing import Any

from tekso.framework import task_results
from tekso.framework.execution.base import ExecutionError
from tekso.framework.layer import Layer
from tekso.framework.pieces import Piece
from tekso.framework.task import Task


def pieces_of_loss(task: Any) -> list[Piece]:
    """Returns `task.pieces()`.

    Raises:
      ExecutionError: a subclass overrides loss() of a task, or fprop() of a model, and not
        pieces(), so that a pipeline would train another loss than the other executions.
      TaskError: it is no list of pieces.
    """
    for layer in task.walk():
        if hasattr(layer, "pieces"):
            _check_overrides(layer, "loss" if isinstance(layer, Task) else "fprop")
    return task_results.pieces(task)


def _check_overrides(layer: Layer, method: str) -> None:
    order = type(layer).__mro__
    one, pieces = (next(c for c in order if name in vars(c)) for name in (method, "pieces"))
    if pieces is Task or order.index(one) >= order.index(pieces):
        return
    name = type(layer).__name__
    raise ExecutionError(
        f"{task_results.method_of(one, method)} overrides what "
        f"{task_results.method_of(pieces, 'pieces')} computes. A pipeline runs pieces() and not "
        f"{method}(), so it would not train the loss of {name}: override pieces() in {name} as "
        "well, so that both compute the same, or use --execution=data_parallel"
    )
