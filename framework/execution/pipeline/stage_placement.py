"""Where the stages of a pipeline run, if not on one device each."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.params import Configurable
from tekso.framework.signature import Signature
from tekso.framework.task import Task


@dataclasses.dataclass(frozen=True)
class PlacedStages:
    """The places of the stages of a task.

    Attributes:
      names: a name for the place of every stage, one replica after the other.
      backends: returns the backends of the stages of a plan, [replica][stage].
    """

    names: list[str]
    backends: Callable[[PipelinePlan], list[list[StageBackend]]]


class StagePlacement(Configurable, abc.ABC):
    """Base class of the places of stages, for `stages_on` of a pipeline.

    Args:
      params: Params of the placement.
      num_stages: number of places of a replica.
      num_replicas: number of pipelines that run side by side.
    """

    class Params(Configurable.Params):
        """Params of StagePlacement."""

    def __init__(self, params: Any, *, num_stages: int = 1, num_replicas: int = 1) -> None:
        super().__init__(params)
        self.num_stages, self.num_replicas = num_stages, num_replicas

    @abc.abstractmethod
    def setup_devices(self, *, cpu_devices: int | None) -> None:
        """Sets up threads and devices, as `Execution.setup_devices`."""

    @abc.abstractmethod
    def place(self, task: Task, micro_batch: Signature) -> PlacedStages:
        """Returns the places of the stages of a task; call it after `setup_devices`.

        Args:
          task: the task.
          micro_batch: signature of a micro-batch of one replica.

        Raises:
          ExecutionError: the places do not fit the task, or there are too few devices.
        """

    def activation_dtype(self, dtype: str) -> str:
        """Returns the type of activations, given `run.activation_dtype`."""
        return dtype
