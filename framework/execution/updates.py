"""Base class of the ways in which data-parallel execution combines updates of other processes."""

from __future__ import annotations

import abc

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.params import Configurable
from tekso.framework.step import Step
from tekso.framework.task import Task


class Updates(Configurable, abc.ABC):
    """Base class of the values of `updates` of DataParallel."""

    class Params(Configurable.Params):
        """Params of Updates."""

    @abc.abstractmethod
    def setup_devices(self, *, tpu: str | None, cpu_devices: int | None) -> None:
        """Sets up threads and devices, and connects to other processes; see `Execution`."""

    @property
    @abc.abstractmethod
    def num_parts(self) -> int:
        """Number of equal parts of a batch, each of which one worker computes."""

    @abc.abstractmethod
    def check_parts(self, task: Task, size: int, accumulation: int) -> None:
        """Checks that workers can compute the parts of a batch.

        Args:
          task: the task.
          size: number of examples of the batch.
          accumulation: number of accumulation steps of a worker.

        Raises:
          ExecutionError: the batch cannot be divided so, or a layer compares all of its examples.
        """

    @abc.abstractmethod
    def program(self, local: DataParallelProgram, step: Step) -> ExecutionProgram:
        """Returns the program of a step; allocates nothing yet.

        Args:
          local: the program of one device, of which workers compute parts, and which evaluates.
          step: the steps of a task and a learner.
        """
