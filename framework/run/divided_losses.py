"""Checks that the parts in which a batch is computed have the loss of the whole batch.

    loss of {0, 1, 2, 3, 4, 5}  =  loss of {0, 1, 2} on one device + loss of {3, 4, 5} on another
                                =  loss of {0, 1, 2}, and then of {3, 4, 5}: accumulation steps

Only tasks that couple examples otherwise than by batch statistics are checked: a loss such as an
in-batch softmax must gather the examples of all devices, and cannot be computed in accumulation
steps. The host computes two devices in two threads, op by op; `ops.sum_over_replicas` sums over the
threads. Accumulation steps are two threads that sum only batch statistics, so these are no finding.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import Mode, StepContext
from tekso.framework.counting import counted
from tekso.framework.coupling import by_statistics, coupling, named
from tekso.framework.draws import HasStream
from tekso.framework.execution.base import parts_of
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.execution.replica_context import ReplicaContext
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.params import Params
from tekso.framework.run import wrong_ids
from tekso.framework.run.loss_causes import LossError
from tekso.framework.run.loss_trial import (
    Batch,
    Trial,
    different_repetition,
    repeated,
    rows_of,
)
from tekso.framework.task import Task

_TRAINING = "input"
_FEW = 16  # examples of a device, that are computed first
_SMALL = 0.1  # standard deviation of numbers in place of weights that are 0
_PATIENCE_S = 600.0  # how long a thread waits for the sum of the other one
_UNEQUAL = (
    "one of two devices sums over the devices (ops.sum_over_replicas), and the other does not"
)
_SEPARATE = "accumulation steps, or workers of execution.updates"
_WHEN: Mapping[Mode, str] = {"train": "training", "eval": "evaluation"}


@dataclasses.dataclass(frozen=True)
class Division:
    """How a batch is divided to compute its loss.

    Attributes:
      devices: number of devices, each of which computes a part of a batch. They can sum over each
        other. Towers of a device count as devices.
      parts: number of parts of a training batch that cannot, such as accumulation steps.
    """

    devices: int = 1
    parts: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether a batch is not divided."""
        return self.devices == self.parts == 1

    def text(self) -> str:
        """Returns the number of parts, for messages."""
        if self.parts == 1:
            return f"on {self.devices} devices equals that of one"
        return f"in {self.parts} parts ({_SEPARATE}) equals that of the whole batch"


UNDIVIDED = Division()


def division_of(execution: Params, devices: int, *, accumulation: int) -> Division:
    """Returns how an execution divides a batch.

    Args:
      execution: its Params.
      devices: number of devices of data-parallel execution, of all processes. It counts neither for
        other executions, which compute a batch together, nor with `execution.updates`.
      accumulation: number of accumulation steps.
    """
    params: Any = execution
    if not issubclass(params.owner, DataParallel):
        return Division(1, accumulation)
    towers = params.towers or 1  # None: one, if a layer couples examples
    if params.updates is None:
        return Division(devices * towers, accumulation)
    return Division(towers, params.updates.instantiate().num_parts * accumulation)


def couples(task: Task) -> bool:
    """Returns whether a layer couples examples, other than by batch statistics."""
    return bool(_coupling(task))


def _coupling(task: Task) -> list[Layer]:
    return [layer for layer in coupling(task) if not by_statistics(layer)]


def unchecked(task: Task, division: Division, *, is_large: bool = True) -> list[str]:
    """Returns the warning about a task that cannot be checked, if it should be.

    Args:
      task: the task.
      division: how a batch is divided.
      is_large: whether the weights are too large; otherwise, a mesh has several processes.
    """
    if division.is_whole or not couples(task):
        return []
    why = "is too large to check" if is_large else "has several processes, which do not check"
    return [
        f"{type(task).__name__} couples the examples of a batch, and {why} whether its loss "
        f"{division.text()}"
    ]


def statistics_of_parts(task: Task, division: Division) -> list[str]:
    """Returns the warning that batch statistics are those of a part of a batch, or []."""
    found = [named(layer) for layer in coupling(task) if layer.has_statistics]
    if division.parts == 1 or not found:
        return []
    others = f" and {counted(len(found) - 1, 'other layer')}" if found[1:] else ""
    return [
        f"in training, the batch statistics of {found[0]}{others} are computed within each of "
        f"{division.parts} parts of a batch ({_SEPARATE}): losses are not those of whole batches"
    ]


def failed(task: Task, division: Division, error: Exception) -> str:
    """Returns the warning about a check that ended with an error of user code."""
    reason = str(error).partition("\n")[0]
    what = f"whether the loss of {type(task).__name__} {division.text()}"
    return f"it could not be checked {what}: {reason}"


def check(trial: Trial, inputs: Mapping[str, Input], *, division: Division, trains: bool) -> None:
    """Rejects a loss that the parts of a batch would not have as the whole batch has it.

    Args:
      trial: the task with its weights.
      inputs: {path in the tree: input}; the training input is "input".
      division: how a batch is divided.
      trains: whether the task is trained; otherwise it is only evaluated.

    Raises:
      LossError: the loss of a training step, or of an evaluation, differs.
    """
    if division.is_whole or not couples(trial.task):
        return
    trials = [*without_zeros(trial), trial]
    for path, input in inputs.items():
        mode: Mode = "train" if path == _TRAINING else "eval"
        if (mode == "train" and not trains) or input.num_batches == 0:
            continue
        for step in input.steps_of_each_kind():
            batch = input.batch(step)
            with wrong_ids.naming(trial, batch, f"{path}.batch({step})"):
                if text := problem(trials, batch, division=division, mode=mode):
                    raise LossError(text)


def without_zeros(trial: Trial, *, biases: bool = False) -> list[Trial]:
    """Returns the trial with random numbers in place of weights that are 0; nothing without these.

    A last layer that is initialized with zeros would hide that the loss couples examples. State
    that is not trained stays as it is.

    Args:
      trial: the task with its weights.
      biases: replace biases, too.
    """
    learned = {path for path, spec in trial.task.specs().items() if spec.trainable}
    filled = {
        path: tf.cast(tf.random.stateless_normal(w.shape, [number, 0], stddev=_SMALL), w.dtype)
        for number, (path, w) in enumerate(trial.weights.items())
        if path in learned and not tf.reduce_any(w != 0)
        if biases or not path.endswith("bias")
    }
    return [Trial(trial.task, {**trial.weights, **filled})] if filled else []


def problem(trials: Sequence[Trial], batch: Batch, *, division: Division, mode: Mode) -> str:
    """Returns why the parts of a batch would have another loss than the whole batch, or "".

    If all layers that couple examples say that they gather them, the loss of some examples is
    enough. A loss that couples only neighbours, such as triplets, is correct if no part begins
    between them: so each of two parts has as many examples as in training.

    Args:
      trials: the task with its weights; the first one whose losses are finite is compared.
      batch: a global batch.
      division: how a batch is divided.
      mode: in which the loss is computed.
    """
    size, task = len(next(iter(batch.values()))), trials[0].task
    if mode == "train" and division.parts > 1:
        together = size // division.devices
        own = together // parts_of(together, division.parts) if together else 0
        differing = _losses(trials, batch, own, mode, kind=_SeparateContext) if own else None
        if differing is not None:
            return _text_of_parts(task, 2 * own, *differing)
    own = size // division.devices
    if division.devices == 1 or own == 0:  # the program rejects no examples
        return ""
    few = min(_FEW, own)
    if few < own and all(layer.gathers_examples for layer in _coupling(task)):
        with contextlib.suppress(Exception):  # the task may need a multiple of more examples
            if _losses(trials, batch, few, mode) is None:
                return ""
    differing = _losses(trials, batch, own, mode)
    return "" if differing is None else _text(task, 2 * own, *differing, mode)


def _sum_of_statistics(ctx: StepContext, x: tf.Tensor, layer: HasStream) -> tf.Tensor:
    one = cast(Layer, layer)
    own = one.has_statistics and not one.gathers_examples
    summed: tf.Tensor = cast(ReplicaContext, ctx).all_reduce(x) if own else x
    return summed


_FORMS = {"sum_over_replicas": _sum_of_statistics}


class _SeparateContext(ReplicaContext):
    """A context of a part that exchanges nothing with others but batch statistics."""

    forms = _FORMS


def _losses(
    trials: Sequence[Trial],
    batch: Batch,
    own: int,
    mode: Mode,
    *,
    kind: type[ReplicaContext] = ReplicaContext,
) -> tuple[float, float] | None:
    """Returns the loss sums of a whole and of two parts, of `own` examples each; None: equal.

    They are those of the first trial whose loss sums are finite.
    """
    examples = rows_of(batch, slice(2 * own))
    for trial in trials:
        together = loss_sum(trial, examples, StepContext(mode=mode, num_examples=2 * own))
        apart = _of_two_parts(trial, examples, mode, kind)
        if not math.isfinite(together + apart):
            continue
        if not trial.differ(together, apart, scale=max(abs(together), abs(apart))):
            return None
        again = repeated(functools.partial(_of_two_parts, trial, examples, mode, kind))
        is_random = different_repetition(apart, together, again) is not None
        return None if is_random else (together, apart)
    return None


def _text(task: Task, size: int, together: float, apart: float, mode: Mode) -> str:
    found = map(named, _coupling(task))
    return (
        f"{task_results.source_of_loss(task)} depends on the number of devices: in {_WHEN[mode]}, "
        f"the first {size} examples have a loss sum of {together:g} on one device, and of "
        f"{apart:g} on two with {counted(size // 2, 'example')} each. Each device has only a part "
        f"of the batch, and {' and '.join(found)} must couple the examples of all. Set "
        "gathers_examples = True there, and gather them with ops.sum_over_replicas, each at its "
        'place from ctx.example_offset on: "Compare the examples of all devices" in '
        "docs/own_model.md has the code. Or use one device, or --execution=mesh_sharded"
    )


def _text_of_parts(task: Task, size: int, together: float, apart: float) -> str:
    found = " and ".join(map(named, _coupling(task)))
    return (
        f"{task_results.source_of_loss(task)} depends on the number of parts of a batch: in "
        f"training, the first {size} examples have a loss sum of {together:g} together, and of "
        f"{apart:g} in two parts with {counted(size // 2, 'example')} each. The parts "
        f"({_SEPARATE}) do not exchange examples, but the examples of a batch are coupled by "
        f"{found}. Set learner.accumulation_steps=1 and no execution.updates, and a smaller "
        "input.batch_size if the memory is too small"
    )


def loss_sum(trial: Trial, batch: Batch, ctx: StepContext) -> float:
    """Returns the loss sum of these examples, with the auxiliary losses of layers."""
    return float(loss_tensor(trial, batch, ctx))


def loss_tensor(trial: Trial, batch: Batch, ctx: StepContext) -> tf.Tensor:
    """Returns the loss sum of these examples, with the auxiliary losses of layers.

    Shapes:
      returns: [] float64
    """
    with tf.device("CPU:0"):
        examples = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
        sums = task_results.loss(trial.task, trial.task.theta(trial.weights), examples, ctx)
        total = tf.cast(tf.reduce_sum(sums.loss_sum), tf.float64)
        for mean, _ in ctx.collected.sums["loss"].values():
            total += tf.cast(mean, tf.float64) * float(ctx.num_examples or 0)
        return total


def _of_two_parts(trial: Trial, batch: Batch, mode: Mode, kind: type[ReplicaContext]) -> float:
    """Returns the loss sum of two parts, each with one half of the examples."""
    size = len(next(iter(batch.values())))
    threads = _Threads(2)

    def part(number: int) -> float:
        start, stop = number * size // 2, (number + 1) * size // 2
        ctx = kind(
            all_reduce=threads.all_reduce(number),
            mode=mode,
            num_examples=size,
            example_offset=start,
        )
        try:
            found = loss_sum(trial, rows_of(batch, slice(start, stop)), ctx)
            threads.end(number)
            return found
        except BaseException:
            threads.barrier.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(part, number) for number in range(2)]
    errors = [error for call in calls if (error := call.exception()) is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error  # not the one that only says that the other thread had an error
    return sum(call.result() for call in calls)


class _Threads:
    """Sums tensors over threads.

    Attributes:
      barrier: each thread waits for the others there.
    """

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=_PATIENCE_S)
        self._given: list[list[tf.Tensor] | None] = [None] * count

    def end(self, number: int) -> None:
        """Ends a thread; another one that waits for a sum has an error."""
        self._given[number] = None
        self.barrier.wait()
        if any(given is not None for given in self._given):
            raise LossError(_UNEQUAL)

    def all_reduce(self, number: int) -> Callable[[Any], Any]:
        """Returns the function that one thread calls with its tensors, to get the sums."""

        def summed(nest: Any) -> Any:
            self._given[number] = tf.nest.flatten(nest)
            self.barrier.wait()
            given = [own for own in self._given if own is not None]
            if len(given) < len(self._given):
                raise LossError(_UNEQUAL)
            sums = [tf.add_n(column) for column in zip(*given, strict=True)]
            self.barrier.wait()  # before the next tensors are given
            return tf.nest.pack_sequence_as(nest, sums)

        return summed
