"""Base class of the executions that divide a model into stages and a batch into micro-batches."""

from __future__ import annotations

import abc
from typing import Any

from tekso.framework.counting import multiples_near
from tekso.framework.execution.base import Execution
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.gradient_combination import needs_each_gradient
from tekso.framework.params import param
from tekso.framework.signature import Signature, num_examples
from tekso.framework.task import Task


class StagedExecution(Execution):
    """Base class of pipelines, which divide a model into stages."""

    class Params(Execution.Params):
        """Params of StagedExecution."""

        num_stages: int = param(
            "Number of devices of the pipeline, each with a part of the model.", default=2
        )
        num_micro_batches: int = param(
            "Equal parts of a batch that pass through the stages one after the other.", default=4
        )
        num_replicas: int = param(
            "Number of parallel pipelines, each with its share of every micro-batch.", default=1
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name in ("num_stages", "num_micro_batches", "num_replicas"):
            if getattr(self.params, name) < 1:
                raise ExecutionError(
                    f"execution.{name} is {getattr(self.params, name)}, but must be at least 1"
                )

    @abc.abstractmethod
    def plan(
        self, task: Task, batch: Signature, *, parts: int, dtype: str = "float32"
    ) -> PipelinePlan:
        """Returns the plan of a pipeline, with placeholder names of devices; needs no device.

        Args:
          task: the task.
          batch: signature of the global batch.
          parts: number of accumulation steps.
          dtype: type of activations, as in `build`.

        Raises:
          ExecutionError: the task, the batch and the Params are incompatible.
        """

    def micro_batch(self, batch: Signature, *, parts: int, is_other: bool = False) -> Signature:
        """Returns the signature of the micro-batch that one replica computes.

        Args:
          batch: signature of the global batch.
          parts: see `division`.
          is_other: see `division`.

        Raises:
          ExecutionError: see `division`.
        """
        size = num_examples(batch)
        parts, count = self.division(size, parts, is_other=is_other)
        examples = size // (parts * count * self.params.num_replicas)
        return {n: ((examples, *shape[1:]), dtype) for n, (shape, dtype) in batch.items()}

    def division(self, size: int, parts: int, *, is_other: bool = False) -> tuple[int, int]:
        """Returns the number of accumulation steps of a batch, and of micro-batches of each.

        They are as configured. If batches differ in size, they are as many as divide this one, at
        most the configured numbers.

        Args:
          size: number of examples of the batch.
          parts: configured number of accumulation steps.
          is_other: whether the batch has another shape than the first one.

        Raises:
          ExecutionError: the batch does not divide evenly.
        """
        p = self.params
        if not (self.batches_differ or is_other):
            if size % (parts * p.num_micro_batches * p.num_replicas):
                raise ExecutionError(self._undivided(size, parts))
            return parts, p.num_micro_batches
        for steps in range(parts, 0, -1):
            for count in range(p.num_micro_batches, 0, -1):
                if size % (steps * p.num_replicas * count) == 0 and self._accepts(count):
                    return steps, count
        raise ExecutionError(self._indivisible(size))

    def _undivided(self, size: int, parts: int) -> str:
        """Returns that the configured numbers do not divide a batch, and which would."""
        p = self.params
        others = parts * p.num_replicas
        even = [m for m in range(1, size // others + 1) if size % (m * others) == 0]
        fewer = f", or micro-batches: {', '.join(map(str, even))}" if even else ""
        of_parts = f", {parts} accumulation steps" if parts > 1 else ""
        of_replicas = f", {p.num_replicas} replicas" if p.num_replicas > 1 else ""
        near = multiples_near(size, others * p.num_micro_batches)
        return (
            f"input.batch_size {size} does not divide evenly over {p.num_micro_batches} "
            f"micro-batches (execution.num_micro_batches){of_replicas}{of_parts}; the nearest "
            f"that do: {', '.join(map(str, near))}{fewer}"
        )

    def _indivisible(self, size: int) -> str:
        """Returns that a batch of an input whose batches differ in size cannot be divided."""
        return (
            f"{self.params.num_replicas} replicas (execution.num_replicas) do not divide a batch "
            f"of {size} examples. Batches of this input differ in size: choose 1 replica, or an "
            "input whose batches have one size"
        )

    def _accepts(self, num_micro_batches: int) -> bool:
        """Whether the schedule runs a number of micro-batches."""
        del num_micro_batches
        return True

    def _by_replica(self, names: list[str]) -> list[list[str]]:
        """Returns the devices of every replica, [replica][device]."""
        stages = self.params.num_stages
        return [names[r * stages :][:stages] for r in range(self.params.num_replicas)]

    def _placeholder_names(self) -> list[str]:
        return [f"device {i}" for i in range(self.params.num_stages * self.params.num_replicas)]


def check_adds_gradients(task: Task, execution: str) -> None:
    """Checks that the gradients of several losses are only added.

    Raises:
      ExecutionError: the task combines them in another way.
    """
    if needs_each_gradient(task.gradients, task.losses):
        raise ExecutionError(
            f"task.gradients is {type(task.gradients).__name__}, which needs the gradient of "
            f"every task, but --execution={execution} computes only their sum: use "
            "--execution=data_parallel or mesh_sharded, or "
            "--set task.gradients=tekso.framework.gradient_combination:SumOfGradients"
        )
