"""The plan of a pipeline: everything that is decided before it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

from tekso.framework.counting import counted
from tekso.framework.execution.pipeline.actions import WEIGHT_GRADIENT, Action, device_of
from tekso.framework.execution.pipeline.stages import StagePlan

Rematerialize = Literal["none", "all", "except_last"]
Costs = Literal["traced", "measured"]


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """How a task is partitioned over devices.

    Attributes:
      stage_plan: the stages.
      by_device: the actions of each device of a pipeline, in order.
      devices: names of the devices of every replica, [replica][device].
      batch_size: number of examples of the global batch.
      num_parts: parts of the batch that go through the pipeline one after the other
        (accumulation).
      num_micro_batches: number of micro-batches of each part.
      rematerialize: which micro-batches save only their stage inputs between forward and backward.
      xla: what XLA compiles: "clusters" of elementwise ops, or "none".
      costs: how `piece_costs` were found: from "traced" graphs, or as "measured" times.
      piece_costs: cost of every piece of the task, forward and backward; only ratios are used.
    """

    stage_plan: StagePlan
    by_device: Sequence[Sequence[Action]]
    devices: Sequence[Sequence[str]]
    batch_size: int
    num_parts: int
    num_micro_batches: int
    rematerialize: Rematerialize
    xla: str
    costs: Costs = "traced"
    piece_costs: Sequence[float] = ()

    @property
    def num_replicas(self) -> int:
        """Number of pipelines that run side by side, each on its share of every micro-batch."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Number of devices of a pipeline."""
        return len(self.by_device)

    @property
    def actions(self) -> list[Action]:
        """The actions of all devices of a pipeline."""
        return [action for order in self.by_device for action in order]

    @property
    def orders(self) -> Mapping[tuple[int, int], Sequence[Action]]:
        """`by_device` of all replicas: {(replica, device): the actions of that worker}."""
        return {
            (replica, device): order
            for replica in range(self.num_replicas)
            for device, order in enumerate(self.by_device)
        }

    @property
    def micro_batch_size(self) -> int:
        """Number of examples that a device computes at a time."""
        parts = self.num_parts * self.num_micro_batches * self.num_replicas
        return self.batch_size // parts

    def device_of(self, replica: int, stage: int) -> str:
        """Returns the name of the device that runs a stage."""
        return self.devices[replica][device_of(stage, self.num_devices)]

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed at different times."""
        return any(action.kind == WEIGHT_GRADIENT for action in self.actions)

    def saves(self, micro_batch: int) -> bool:
        """Whether a micro-batch saves the activations that its backward pass needs."""
        is_last = micro_batch == self.num_micro_batches - 1
        return self.rematerialize == "none" or (self.rematerialize == "except_last" and is_last)

    @property
    def saves_some(self) -> bool:
        """Whether any micro-batch saves its activations."""
        return self.rematerialize != "all"

    @property
    def recomputes_some(self) -> bool:
        """Whether any micro-batch recomputes its activations."""
        return not all(self.saves(m) for m in range(self.num_micro_batches))


def rows_of_stages(num_stages: int, num_replicas: int) -> str:
    """Returns the stages of a pipeline as text, "4 stages" or "2 replicas of 4 stages"."""
    stages = counted(num_stages, "stage", grouping="")
    return stages if num_replicas == 1 else f"{num_replicas} replicas of {stages}"
