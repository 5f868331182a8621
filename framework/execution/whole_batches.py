"""Rejects parts of a batch that run one after the other, for losses over the whole batch."""

from __future__ import annotations

from tekso.framework.coupling import gathering
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.task import Task

ACCUMULATION = ("accumulation steps", "set learner.accumulation_steps=1")
"""The last arguments of `check_whole` for accumulation steps."""


def check_whole(task: Task, parts: int, what: str, cure: str) -> None:
    """Checks that a batch is not computed in parts, if a layer compares all of its examples.

    Args:
      task: the task.
      parts: number of parts that do not exchange examples.
      what: what the parts are, in the plural.
      cure: what to set instead.

    Raises:
      ExecutionError: it is.
    """
    found = gathering(task)
    if found and parts > 1:
        raise ExecutionError(
            f"{found[0]} compares every example with all others of the batch, but the batch is "
            f"computed in {parts} {what}, which do not exchange examples: {cure}"
        )
