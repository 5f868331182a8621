"""The parts of an experiment that determine a step, and the plan of a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekso.framework import schedules
from tekso.framework.costs import graph_time, this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.base import Execution
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Tree
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.collectives import Collective
from tekso.framework.run import step_graphs
from tekso.framework.run.batch_kinds import ONE_KIND, BatchKind, BatchKinds
from tekso.framework.run.forward_flops import forward_flops
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.task import Task
from tekso.framework.units import bytes_text, seconds_text

NO_STARTS = (
    "the time is without the start of ops, which takes most of the step of a small model on a CPU"
)


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
      tried: settings with which it does not fit either, of a ranked step that does not fit.
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
    tried: str = ""

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

    @property
    def bytes_of_all_devices(self) -> float:
        """Bytes of all devices together, as if each needed as much as the one that needs most.

        On this machine, that of a pipeline is known: its stages differ.
        """
        if self.shared_bytes is not None:
            return self.shared_bytes
        return self.total_bytes * self.devices


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of an experiment that determine the cost of a step.

    Attributes:
      tree: the Params.
      task: the task.
      learner: the learner.
      batch: signature of the global batch.
      device: type of the devices.
      kinds: the kinds of batches.
    """

    tree: Tree.Params
    task: Task
    learner: LearnerBase
    batch: Signature
    device: DeviceType
    kinds: BatchKinds = ONE_KIND

    @property
    def data_parallel(self) -> Any:
        """Params of data-parallel execution: the defaults if the experiment has another one."""
        execution: Any = self.tree.execution
        return execution if issubclass(execution.owner, DataParallel) else DataParallel.Params()

    def with_accumulation(self, steps: int) -> StepParts:
        """Returns the parts with another number of accumulation steps."""
        tree = self.tree.copy()
        tree.set({"learner.accumulation_steps": steps})
        learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
        return dataclasses.replace(self, tree=tree, learner=learner)

    def dtype(self, execution: Execution) -> str:
        """Returns the type in which layers compute under an execution."""
        found: str = execution.activation_dtype(self.tree.run.activation_dtype)
        return found

    @functools.cached_property
    def forward_flops(self) -> dict[str, float]:
        """See `forward_flops.py`: of the batch, or the mean of the kinds of batches."""
        found: dict[str, float] = {}
        for _, share, batch in self.kinds.kinds or [BatchKind("", 1.0, self.batch)]:
            for name, flops in forward_flops(self.task, batch).items():
                found[name] = found.get(name, 0.0) + share * flops
        return found

    def of_each_kind(self, plan: Callable[[StepParts], StepPlan]) -> StepPlan:
        """Returns a step, or what is planned for all kinds of batches.

        Args:
          plan: plans a step, given the parts with the batch of a kind.
        """
        kinds, what, note, _ = self.kinds
        if not kinds:
            step = plan(self)
            return dataclasses.replace(step, notes=(note, *step.notes)) if note else step
        steps = [plan(dataclasses.replace(self, batch=one.batch, kinds=ONE_KIND)) for one in kinds]
        shares = [one.share for one in kinds]
        largest = max(range(len(steps)), key=lambda n: steps[n].bytes_together)

        def mean(values: Sequence[float]) -> float:
            return math.fsum(map(operator.mul, shares, values))

        texts = [
            f"{one.name} {one.share:.0%} ({seconds_text(step.seconds)}, "
            f"{bytes_text(step.total_bytes)})"
            for one, step in zip(kinds, steps, strict=True)
        ]
        note = (
            f"{what}: {', '.join(texts)}; time and operations, also of the forward pass, are the "
            f"mean, and memory and the other notes are of {kinds[largest].name}"
        )
        cores = [step.core_seconds for step in steps]
        known = [one for one in cores if one is not None]
        return dataclasses.replace(
            steps[largest],
            flops=mean([step.flops for step in steps]),
            seconds=mean([step.seconds for step in steps]),
            core_seconds=mean(known) if len(known) == len(steps) else None,
            notes=(note, *steps[largest].notes),
        )

    @functools.cached_property
    def update_seconds(self) -> float:
        """Time of the ops of the update of all weights on a core of this machine."""
        step = Step(self.task, self.learner, seed=0, dtype=self.tree.run.activation_dtype)
        plain = DataParallel.Params(xla="none", towers=1)
        graphs = step_graphs.trace(step, self.batch, plain)
        _, of_passes = graph_time.moved_by_others(graphs.runs)
        speed = this_machine.measured().side_by_side
        return graph_time.seconds(graphs.update, speed, between=of_passes)
