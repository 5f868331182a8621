"""The parts of an experiment that determine a step, and the plan of a step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from tekso.framework.costs import graph_time, this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.base import Execution
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Tree
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.collectives import Collective
from tekso.framework.run import step_graphs
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.task import Task


def measured_note(dtype: str) -> str:
    """Returns what the time of a plan of this machine is based on.

    Args:
      dtype: type in which the layers compute.
    """
    of = "" if dtype == "float32" else f" in float32: a step in {dtype} may take much longer"
    return f"the speed of this machine was measured{of}; memory is without TensorFlow itself"


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A training step under one execution.

    Attributes:
      name: the execution with its layout.
      devices: number of devices.
      memory: bytes of the device that needs most, by what they hold.
      flops: floating-point operations of the device that computes most.
      seconds: estimated time.
      idle_share: share of the time in which devices of a pipeline are idle; 0 without a pipeline.
      notes: where the time and the memory go.
      core_seconds: estimated time of all cores of this machine together; None: not known.
      counted_bytes: the part of the memory that TensorFlow's statistics of this machine count, see
        `graph_memory.COUNTED_BYTES`, of all devices together; None: not known.
      sharing_devices: number of devices that share the memory of one.
      shared_bytes: bytes of these devices together; None: all need as much as this one.
      collectives: collectives of a device in a step, by axis and kind.
      sent_bytes: bytes that a device of a pipeline sends to other stages in a step; 0 without a
        pipeline.
    """

    name: str
    devices: int
    memory: Mapping[str, float]
    flops: float
    seconds: float
    idle_share: float = 0.0
    notes: tuple[str, ...] = ()
    core_seconds: float | None = None
    counted_bytes: float | None = None
    sharing_devices: int = 1
    shared_bytes: float | None = None
    collectives: tuple[Collective, ...] = ()
    sent_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes of the device that needs most."""
        return math.fsum(self.memory.values())

    @property
    def bytes_together(self) -> float:
        """Bytes of all devices that share the memory of one."""
        if self.shared_bytes is None:
            return self.total_bytes * self.sharing_devices
        return self.shared_bytes


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of an experiment that determine the cost of a step.

    Attributes:
      tree: the Params.
      task: the task.
      learner: the learner.
      batch: signature of the global batch.
      device: type of the devices.
    """

    tree: Tree.Params
    task: Task
    learner: LearnerBase
    batch: Signature
    device: DeviceType

    def dtype(self, execution: Execution) -> str:
        """Returns the type in which layers compute under an execution."""
        found: str = execution.activation_dtype(self.tree.run.activation_dtype)
        return found

    @functools.cached_property
    def update_seconds(self) -> float:
        """Time of the ops of the update of all weights on a core of this machine."""
        step = Step(self.task, self.learner, seed=0, dtype=self.tree.run.activation_dtype)
        plain = DataParallel.Params(xla="none", towers=1)
        graphs = step_graphs.trace(step, self.batch, plain)
        _, of_passes = graph_time.moved_by_others(graphs.runs)
        speed = this_machine.measured().side_by_side
        return graph_time.seconds(graphs.update, speed, between=of_passes)
