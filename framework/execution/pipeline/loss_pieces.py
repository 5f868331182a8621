"""Checks that no subclass overrides loss() without pieces(), and returns the pieces of a task."""

from __future__ import annotations

from tekso.framework import task_results
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.pieces import Piece
from tekso.framework.task import Task


def pieces_of_loss(task: Task) -> list[Piece]:
    """Returns `task.pieces()`.

    Raises:
      ExecutionError: a subclass overrides loss() of the task but not pieces(), so a pipeline would
        train a different loss than the other executions.
      TaskError: pieces() does not return a list of pieces, or a model overrides fprop() but not
        pieces().
    """
    overriding = task_results.overrides(task, "loss")
    if overriding is not None and overriding[1] is not Task:
        one, pieces = overriding
        name = type(task).__name__
        raise ExecutionError(
            f"{task_results.method_of(one, 'loss')} overrides what "
            f"{task_results.method_of(pieces, 'pieces')} computes. A pipeline runs pieces() and "
            f"not loss(), so it would not train the loss of {name}: override pieces() in {name} "
            "as well, so that both compute the same, or use --execution=data_parallel"
        )
    return task_results.pieces(task)
