"""Finds the layers of a task that couple the examples of a batch."""

from __future__ import annotations

from collections.abc import Iterable

from tekso.framework.execution.errors import ExecutionError
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


def refuse_unsummed(task: Task, statistics: Iterable[str]) -> None:
    """Rejects batch statistics of a training step in which nothing was summed over the replicas.

    A sum does not name its layer. So a layer that sums nothing is not found beside one that does.

    Args:
      task: the task, of which each replica or tower computes a part of the batch.
      statistics: "<layer path>/<name>" of the statistics that its layers collected.

    Raises:
      ExecutionError: a layer that couples examples collected some.
    """
    owners = {name.rpartition("/")[0] for name in statistics}
    for layer in coupling(task):
        if layer.path in owners:
            raise ExecutionError(
                f"{named(layer)} couples the examples of a batch, but nothing is summed over the "
                "replicas or towers, so each would compute with statistics of its own part: sum in "
                "the layer with ops.sum_over_replicas(ctx, x), or use one device with "
                "execution.towers=1"
            )
