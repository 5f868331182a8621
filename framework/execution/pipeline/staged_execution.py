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

    def micro_batch(
        self, batch: Signature, *, parts: int, num_micro_batches: int | None = None
    ) -> Signature:
        """Returns the signature of the micro-batch that one replica computes.

        Raises:
          ExecutionError: the batch does not divide evenly.
        """
        p, size = self.params, num_examples(batch)
        count = parts * (num_micro_batches or p.num_micro_batches) * p.num_replicas
        if size % count:
            others = parts * p.num_replicas
            even = [m for m in range(1, size // others + 1) if size % (m * others) == 0]
            fewer = f", or micro-batches: {', '.join(map(str, even))}" if even else ""
            of_parts = f", {parts} accumulation steps" if parts > 1 else ""
            of_replicas = f", {p.num_replicas} replicas" if p.num_replicas > 1 else ""
            raise ExecutionError(
                f"input.batch_size {size} does not divide evenly over {p.num_micro_batches} "
                f"micro-batches (execution.num_micro_batches){of_replicas}{of_parts}; the nearest "
                f"that do: {', '.join(map(str, multiples_near(size, count)))}{fewer}"
            )
        return {n: ((size // count, *shape[1:]), dtype) for n, (shape, dtype) in batch.items()}

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
