"""The error that executions raise, and the text of several problems in one error."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_PROBLEMS = 8  # listed in one error


class ExecutionError(ValueError):
    """A task, a batch, devices and the Params of an execution are incompatible."""


def joined(problems: Sequence[str], separator: str = "; ") -> str:
    """Returns the first problems as one text, with the number of the others."""
    more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
    return separator.join([*problems[:_MAX_PROBLEMS], *more])
