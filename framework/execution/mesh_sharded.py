"""Mesh-sharded execution: shards any dim of any tensor over any axis of a mesh of devices.

    execution.mesh   data:2;model:4                        axes of the mesh and their sizes
    execution.rules  batch:data;mlp:model;heads:model      the axis that shards each dim

One SPMD program on TensorFlow's DTensor runs on all devices. Rules refer to the names of dims,
never to layers. `--mode=inspect_sharding` shows the sharding of every weight.

Source: Shazeer et al. 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers".
"""

from __future__ import annotations

from typing import Any, Literal

from tekso.framework.cluster import Cluster
from tekso.framework.execution.accumulation import part_of
from tekso.framework.execution.base import Execution, ExecutionProgram
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.mesh.sharding_mesh import (
    MeshParams,
    ShardingMesh,
    warn_of_idle_axes,
)
from tekso.framework.execution.whole_batches import ACCUMULATION, check_whole
from tekso.framework.params import param
from tekso.framework.primitives.fusion import Fuse, MarkedFusion, no_fusion
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.task import Task


class MeshSharded(Execution):
    """One program on a mesh of devices, sharded by rules on dimension names."""

    class Params(Execution.Params, MeshParams):
        """Params of MeshSharded."""

        decode_on: Literal["one_device", "mesh"] = param(
            "Where search, sampling and scoring run. one_device: gathers the weights to one "
            "device; faster, and starts sooner. mesh: for models too large for one device, whose "
            "weights are sharded by rules; compiles a program for every batch shape.",
            default="one_device",
        )
        xla: Literal["auto", "none", "clusters"] = param(
            "What XLA compiles: nothing, or large elementwise clusters between matrix products, "
            "once per device. auto: clusters on CPU if every device has its own core (otherwise "
            "compilation would delay the first step).",
            default="auto",
            old_values={"stretches": "clusters"},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._mesh = ShardingMesh(self.params)

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._mesh.join(cluster)

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """See `Execution`."""
        self._mesh.setup_devices(tpu=tpu, cpu_devices=cpu_devices)

    def program(self, step: Step, batch: Signature) -> ExecutionProgram:
        """See `Execution`."""
        check_whole(step.task, step.learner.params.accumulation_steps, *ACCUMULATION)
        part = part_of(batch, step.learner.params.accumulation_steps)
        layout = self.layout(step.task, part, num_devices=self._mesh.num_devices())
        warn_of_idle_axes(layout)
        placement = Placement(self._mesh.make(layout.mesh))
        return MeshProgram(
            step, placement, layout, decode_on=self.params.decode_on, fuse=self._fuse()
        )

    def activation_dtype(self, dtype: str) -> str:
        """See `Execution`."""
        return str(self.params.used_dtype(dtype))

    def _fuse(self) -> Fuse:
        xla = self.params.xla
        if xla == "auto" and self._mesh.have_cores():
            xla = "clusters"
        return MarkedFusion() if xla == "clusters" else no_fusion

    def layout(self, task: Task, batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """See `ShardingMesh.layout`."""
        return self._mesh.layout(task, batch, num_devices=num_devices)
