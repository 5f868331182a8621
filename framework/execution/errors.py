"""The error of the executions."""

from __future__ import annotations


class ExecutionError(ValueError):
    """A task, a batch, devices and the Params of an execution do not fit together."""
