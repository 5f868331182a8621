"""Finds the layers of a task that couple the examples of a batch."""

from __future__ import annotations

from tekso.framework.layer import Layer
from tekso.framework.task import Task


def coupling(task: Task) -> list[Layer]:
    """Returns the layers that couple the examples of a batch."""
    return [layer for layer in task.walk() if layer.couples_examples]


def sums_over_replicas(layer: Layer) -> bool:
    """Returns whether a layer that couples examples does so by `ops.sum_over_replicas`.

    Then the parts of a batch that run concurrently give the result of the whole batch.
    """
    return layer.gathers_examples or layer.has_statistics


def named(layer: Layer) -> str:
    """Returns the path and the class of a layer, for messages."""
    return f"{layer.path or 'the task'} ({type(layer).__name__})"


def gathering(task: Task) -> list[str]:
    """Returns the layers that compare the examples of all replicas."""
    return [named(layer) for layer in task.walk() if layer.gathers_examples]
