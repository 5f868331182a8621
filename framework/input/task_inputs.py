"""Inputs of several tasks: one for training that mixes them, and one for evaluating one of them.

array "ids" of the task "lm" ─► "lm/ids"        so the names say to which task a batch belongs
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.batch_part import BatchPart, RowsOf, num_examples
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Batch, Input, check_step
from tekso.framework.input.skips import SkipReport
from tekso.framework.input.task_mixing import ByWeight, Mixing, TaskOrder
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import SEPARATOR

_MOST_STEPS_SEARCHED = 10_000

AnyBatch = TypeVar("AnyBatch", bound=Mapping[str, np.ndarray])


@dataclasses.dataclass(frozen=True)
class KnownTasks:
    """What is known of the inputs of several tasks without their data.

    Attributes:
      params: Params of the input.
      inputs: {task: what is known of its input}.
    """

    params: Any
    inputs: Mapping[str, Any]


class TaskInputs(Input):
    """The training data of several tasks, each with its own input.

    `unit` says what a step trains:

      one_task   one task, according to `mixing`; its batch is the next batch of its own input.
                 Batches of tasks may have any shapes and sizes.
      all_tasks  every task, with one batch of each; the batches need the same number of examples.
                 Needed to combine gradients of tasks; `mixing` has no effect.

    The n-th batch of a task is that of a run that trains this task alone with the same seed.
    """

    class Params(Input.Params):
        """Params of TaskInputs."""

        inputs: dict[str, Input.Params] = param(
            "{task: its training input}, which has no end.", default=REQUIRED
        )
        mixing: Mixing.Params = param(
            "The share of every task in the steps.", default=ByWeight.Params()
        )
        unit: Literal["one_task", "all_tasks"] = param(
            "Whether a step trains one task, or all tasks together.", default="one_task"
        )

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Opens the inputs.

        Raises:
          InputError: there is no input, one of them has an end, or `mixing` does not fit.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir)
        p = self.params
        if not p.inputs:
            raise InputError(f"{p.path_of('inputs')} is empty: give the input of every task")
        self.inputs: dict[str, Input] = {}
        for name, own in p.inputs.items():
            one = own.instantiate(seed=seed, assets_dir=assets_of(assets_dir, name), train=train)
            if one.num_batches is not None:
                order = ": set its order to 'shuffled'" if "order" in own else ""
                raise InputError(
                    f"{p.path_of('inputs')}.{name} has {one.num_batches} batches, but the training "
                    f"input of a task must be endless{order}"
                )
            self.inputs[name] = one
        mixing: Mixing = p.mixing.instantiate()
        sizes = {name: getattr(one, "num_examples", None) for name, one in self.inputs.items()}
        if p.unit == "one_task":
            mixing.check(sizes)
        self._order = TaskOrder(mixing, sizes, seed=seed)
        self._lock = threading.Lock()

    @classmethod
    def check_params(cls, params: Any) -> None:
        """See `Input`: checks every input."""
        super().check_params(params)
        for own in params.inputs.values():
            own.owner.check_params(own)

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> KnownTasks | None:
        """See `Input`: what is known of the input of every task."""
        found = {
            name: own.owner.known(own, assets_dir=assets_of(assets_dir, name))
            for name, own in params.inputs.items()
        }
        return None if None in found.values() else KnownTasks(params, found)

    @property
    def takes_turns(self) -> bool:
        """Whether a step trains one task."""
        return bool(self.params.unit == "one_task")

    def place(self, step: int) -> tuple[str, int]:
        """Returns the task of a step, and the number of its earlier steps; with one_task only."""
        check_step(step, None)
        with self._lock:  # batches are prefetched by several threads
            return self._order.place(step)

    def steps_of_each_kind(self) -> list[int]:
        """See `Input`: for every task one of the first steps that train it."""
        if not self.takes_turns:
            return [0]
        found: dict[str, int] = {}
        for step in range(_MOST_STEPS_SEARCHED):
            found.setdefault(self.place(step)[0], step)
            if len(found) == len(self.inputs):
                break
        return [found[name] for name in self.inputs if name in found]

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Raises:
          IndexError: the step is negative.
          InputError: with all_tasks: the batches have different numbers of examples.
        """
        return _joined(self._read(step, lambda one, own: one.batch(own)))

    def largest_batch(self) -> Batch:
        """See `Input`: of all tasks, or with one_task of the task whose batch has most bytes.

        Raises:
          InputError: with all_tasks: the batches have different numbers of examples.
        """
        found = self.largest_batches()
        if not self.takes_turns:
            self._check_sizes(found, "the largest batches")
            return _joined(found)
        name = max(found, key=lambda name: sum(array.nbytes for array in found[name].values()))
        return named(name, found[name])

    def largest_batches(self) -> dict[str, Batch]:
        """Returns {task: its largest batch}, for estimates."""
        return {name: one.largest_batch() for name, one in self.inputs.items()}

    def shares(self, steps: int) -> dict[str, float]:
        """Returns {task: its share of the first steps}, with one_task; those without are left out.

        Args:
          steps: number of steps; more than 10,000 are not counted.
        """
        number = max(1, min(steps, _MOST_STEPS_SEARCHED))
        found = collections.Counter(self.place(step)[0] for step in range(number))
        return {name: found[name] / number for name in self.inputs if found[name]}

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        name, own = self.place(step) if self.takes_turns else (next(iter(self.inputs)), step)
        return self.inputs[name].num_rows(own)

    def own_part(self, step: int, rows: RowsOf) -> BatchPart:
        """See `Input`."""
        if type(self).batch is not TaskInputs.batch:
            return super().own_part(step, rows)
        found = self._read(step, lambda one, own: one.own_part(own, rows))
        first = next(iter(found.values()))
        return BatchPart(_joined(found), first.rows, first.num_examples)

    def _read(self, step: int, read: Callable[[Input, int], AnyBatch]) -> dict[str, AnyBatch]:
        """Returns {task: what `read` returns for its input and its step}."""
        if self.takes_turns:
            name, own = self.place(step)
            return {name: read(self.inputs[name], own)}
        check_step(step, None)
        found = {name: read(one, step) for name, one in self.inputs.items()}
        self._check_sizes(found, f"the batches of step {step}")
        return found

    def _check_sizes(self, found: Mapping[str, Mapping[str, np.ndarray]], what: str) -> None:
        sizes = {name: num_examples(batch) for name, batch in found.items()}
        if len(set(sizes.values())) > 1:
            raise InputError(
                f"{self.params.path_of('unit')} is 'all_tasks', but {what} "
                f"have different numbers of examples: "
                f"{', '.join(f'{name} {size}' for name, size in sizes.items())}. Set the same "
                "batch_size for all tasks, with inputs whose batches have a fixed number of "
                "examples; or set unit to 'one_task'"
            )

    def check_unchanged(self) -> None:
        """See `Input`: checks every input."""
        for one in self.inputs.values():
            one.check_unchanged()

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return sum((one.skipped() for one in self.inputs.values()), SkipReport())

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        return "; ".join(f"{name}: {one.describe()}" for name, one in self.inputs.items())


class OneTask(Input):
    """The evaluation data of one task, whose training input is one of `TaskInputs`."""

    class Params(Input.Params):
        """Params of OneTask."""

        task: str = param("Name of the task.", default=REQUIRED)
        input: Input.Params = param(
            "Its evaluation input; by default held-out data of its training input.",
            default=HeldOut.Params(),
        )

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Opens the data.

        Raises:
          InputError: there is no training input of the task.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir)
        p = self.params
        tasks = train.inputs if train is not None and "inputs" in train else {}
        if p.task not in tasks:
            given = ", ".join(tasks) if isinstance(tasks, Mapping) and tasks else "none"
            raise InputError(
                f"{p.path_of('task')} is {p.task!r}, but the tasks with a training input are: "
                f"{given}"
            )
        self.task: str = p.task
        self.input: Input = p.input.instantiate(
            seed=seed, assets_dir=assets_of(assets_dir, p.task), train=tasks[p.task]
        )

    @classmethod
    def check_params(cls, params: Any) -> None:
        """See `Input`."""
        super().check_params(params)
        type(params.input).owner.check_params(params.input)

    def batch(self, step: int) -> Batch:
        """Returns a batch of the pass; see `Input`."""
        return named(self.task, self.input.batch(step))

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        return self.input.num_rows(step)

    def own_part(self, step: int, rows: RowsOf) -> BatchPart:
        """See `Input`."""
        if type(self).batch is not OneTask.batch:
            return super().own_part(step, rows)
        part = self.input.own_part(step, rows)
        return BatchPart(named(self.task, part), part.rows, part.num_examples)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in the pass."""
        return self.input.num_batches

    def is_padding(self, step: int) -> npt.NDArray[np.bool_] | None:
        """See `Input`."""
        return self.input.is_padding(step)

    def excerpt(self) -> list[Batch]:
        """See `Input`."""
        return self.input.excerpt()

    def check_unchanged(self) -> None:
        """See `Input`."""
        self.input.check_unchanged()

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return self.input.skipped()

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        return f"{self.task}: {self.input.describe()}"


def named(task: str, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a task by the names that they have in a batch of several tasks."""
    return {f"{task}{SEPARATOR}{name}": array for name, array in batch.items()}


def of_task(task: str, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a task in a batch of several tasks, by their own names."""
    head = task + SEPARATOR
    return {n[len(head) :]: array for n, array in batch.items() if n.startswith(head)}


def _joined(batches: Mapping[str, Batch]) -> Batch:
    """Returns the arrays of all tasks as one batch."""
    return {key: array for task, own in batches.items() for key, array in named(task, own).items()}


def is_in(task: str, batch: Mapping[str, Any]) -> bool:
    """Returns whether a batch of several tasks has arrays of a task."""
    return any(name.startswith(task + SEPARATOR) for name in batch)


def assets_of(assets_dir: str | None, task: str) -> str | None:
    """Returns the folder of the assets of one task."""
    return None if assets_dir is None else files.join(assets_dir, task)
