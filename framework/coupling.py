"""Finds the layers of a task that couple the examples of a batch."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Set

from tekso.framework.context import StepContext
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.layer import Layer
from tekso.framework.task import Task
from tekso.framework.theta import Theta

_UPDATES = Layer.new_statistics.__code__  # calls `updated_statistics`
_LOOKUPS = (Theta.__getattr__.__code__, Theta.__missing__.__code__)


def coupling(task: Task) -> list[Layer]:
    """Returns the layers that couple the examples of a batch."""
    return [layer for layer in task.walk() if layer.couples_examples]


def by_statistics(layer: Layer) -> bool:
    """Returns whether a layer couples examples by batch statistics only, as BatchNorm does.

    Not a layer that gathers examples, nor a task, whose loss may couple them: the state that their
    `updated_statistics` changes may be a queue, or a momentum encoder.
    """
    is_task = isinstance(layer, Task)
    return layer.has_statistics and not layer.gathers_examples and not is_task


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


def too_few(size: int, layer: str, does: str, devices: int) -> ExecutionError:
    """Returns the error of a batch that leaves devices without an example, which a layer needs.

    Args:
      size: number of examples of the batch.
      layer: the layer.
      does: what it does with the examples, as "compares".
      devices: number of devices, of all processes.
    """
    return ExecutionError(
        f"a batch has {size} examples, but {layer} {does} the examples of all {devices} devices: "
        f"set a batch size of at least {devices}, or use fewer devices"
    )


def refuse_unsummed(task: Task, ctx: StepContext) -> None:
    """Rejects batch statistics of a training step that were not summed over the replicas.

    A layer may leave the sum to a layer inside of it, or to one around it.

    Args:
      task: the task, of which each replica or tower computes a part of the batch.
      ctx: the context of one part, after its loss was computed.

    Raises:
      ExecutionError: a layer that couples examples collected some, and did not sum.
    """
    owners = {name.rpartition("/")[0] for name in ctx.collected.sums["statistic"]}
    summed_by: Iterable[str] = getattr(ctx, "summed", ())  # of a ReplicaContext
    for layer in coupling(task):
        if layer.path in owners and not any(_is_inside(layer.path, by) for by in summed_by):
            raise ExecutionError(
                f"{named(layer)} couples the examples of a batch, but it sums nothing over the "
                "replicas or towers, so each would compute with statistics of its own part: sum in "
                "the layer with ops.sum_over_replicas(ctx, x, self), or use one device with "
                "execution.towers=1"
            )


@contextlib.contextmanager
def weights_elsewhere(task: Task, own: Iterable[str], statistics: Iterable[str]) -> Iterator[None]:
    """Names the layer whose `updated_statistics` lacks weights that another stage stores.

    Args:
      task: the task.
      own: paths of the weights of the stage whose statistics the block updates.
      statistics: paths of these statistics.

    Raises:
      ExecutionError: the block looks up a weight of a layer in another stage.
    """
    try:
        yield
    except (AttributeError, KeyError) as error:
        others = sorted(task.specs().keys() - set(own))
        layer, lacks = _lacking(task, error, others, {s.rpartition("/")[0] for s in statistics})
        if not lacks:
            raise
        raise ExecutionError(
            f"{named(layer)}.updated_statistics reads or returns a weight that another "
            f"stage stores, such as {lacks[0]!r} ({error}). A stage of a pipeline has only "
            "its own weights: use --execution=data_parallel, or fewer stages"
        ) from error


def _lacking(
    task: Task, error: Exception, others: Iterable[str], owners: Set[str]
) -> tuple[Layer, list[str]]:
    """Returns the layer whose `updated_statistics` failed, and which of some weights it may lack.

    Args:
      task: the task.
      error: what `LearningStep.new_statistics` raised.
      others: paths of weights that are not there.
      owners: paths of the layers with statistics.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    updating = [f.f_locals["layer"] for f in frames if f.f_code is _UPDATES]
    if updating:
        layer = updating[-1]
        names = {str(f.f_locals["name"]) for f in frames if f.f_code in _LOOKUPS}
        below = (path for path in others if path.startswith(_head(layer)))
        return layer, [path for path in below if names & {*path.split("/")}]
    lacks = [path for path in others if path in error.args]  # it returned the weight
    layers = [one for one in task.walk() if one.path in owners]
    above = [one for one in layers if lacks and lacks[0].startswith(_head(one))]
    return above[-1] if above else task, lacks


def _head(layer: Layer) -> str:
    return f"{layer.path}/" if layer.path else ""


def _is_inside(one: str, other: str) -> bool:
    """Returns whether one of two layers is the other, or inside of it, given their paths."""
    one, other = sorted((one, other), key=len)
    return not one or f"{other}/".startswith(f"{one}/")
