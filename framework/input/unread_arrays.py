"""Warns about arrays of an input that a task does not read, such as a misspelt name."""

from __future__ import annotations

from collections.abc import Sequence

from tekso.framework.input.input import Input
from tekso.framework.path_patterns import listed
from tekso.framework.spelling import close_matches

_WEIGHTS = "weights"


def unread_warnings(task: str, input: Input, read: Sequence[str]) -> list[str]:
    """Returns a warning if the training input has arrays that a task does not read.

    Args:
      task: name of the class of the task.
      input: the training input.
      read: names of the arrays that the task reads.
    """
    unread = [name for name in input.batch(0) if name not in read]
    if not unread:
        return []
    meant = [name for each in unread for name in _meant(each, read)]
    hint = f"; did you mean {meant[0]!r}?" if meant else ""
    has = "has" if len(unread) == 1 else "have"
    return [f"input: {task} reads {listed(read)} only: {listed(unread)} {has} no effect{hint}"]


def _meant(name: str, read: Sequence[str]) -> list[str]:
    """Returns the array that a name may mean: "weights" for the `sample_weight` of Keras."""
    if _WEIGHTS in read and "weight" in name.lower():
        return [_WEIGHTS]
    return close_matches(name, read, count=1)
