"""Base class of the ways in which data-parallel execution combines updates of other processes."""

from __future__ import annotations

import abc

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.params import Configurable
from tekso.framework.signature import Signature
from tekso.framework.step import Step


class Updates(Configurable, abc.ABC):
    """Base class of the values of `updates` of DataParallel."""

    class Params(Configurable.Params):
        """Params of Updates."""

    @abc.abstractmethod
    def setup_devices(self, *, tpu: str | None, cpu_devices: int | None) -> None:
        """Sets up threads and devices, and connects to other processes; see `Execution`."""

    @abc.abstractmethod
    def parts(self, step: Step, batch: Signature) -> int:
        """Returns into how many equal parts a batch is divided; each is computed by one worker.

        Raises:
          ExecutionError: the batch cannot be divided so.
        """

    @abc.abstractmethod
    def program(self, local: DataParallelProgram, step: Step) -> ExecutionProgram:
        """Returns the program of a step; allocates nothing yet.

        Args:
          local: the program of one device, of which workers compute parts, and which evaluates.
          step: the steps of a task and a learner.
        """
