"""The error that executions raise."""

from __future__ import annotations


class ExecutionError(ValueError):
    """A task, a batch, devices and the Params of an execution are incompatible."""
