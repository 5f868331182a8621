"""Shards every stage of a pipeline over its own mesh, by rules on dimension names."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout
from tekso.framework.execution.mesh.sharding_mesh import (
    MeshParams,
    ShardingMesh,
    warn_of_idle_axes,
)
from tekso.framework.execution.pipeline.actions import device_of
from tekso.framework.execution.pipeline.mesh_backend import MeshBackend
from tekso.framework.execution.pipeline.plan import PipelinePlan, rows_of_stages
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.pipeline.stage_placement import PlacedStages, StagePlacement
from tekso.framework.params import OldField
from tekso.framework.signature import Signature
from tekso.framework.task import Task


class StagesOnMesh(StagePlacement):
    """Shards every stage over its own mesh; all meshes have the same axes and rules."""

    class Params(StagePlacement.Params, MeshParams):
        """Params of StagesOnMesh."""

        old_fields: ClassVar[Mapping[str, OldField]] = {
            "decode_on": OldField("every stage has its own mesh, and decoding runs on one device"),
            "xla": OldField("set execution.xla instead, which compiles the stages"),
        }

    def __init__(self, params: Any, *, num_stages: int = 1, num_replicas: int = 1) -> None:
        super().__init__(params, num_stages=num_stages, num_replicas=num_replicas)
        self._num_meshes = num_stages * num_replicas
        self._mesh = ShardingMesh(
            self.params, num_meshes=self._num_meshes, path="execution.stages_on"
        )

    def setup_devices(self, *, cpu_devices: int | None) -> None:
        """See `StagePlacement`."""
        self._mesh.setup_devices(cpu_devices=cpu_devices)

    def place(self, task: Task, micro_batch: Signature) -> PlacedStages:
        """See `StagePlacement`."""
        layout = self.layout(task, micro_batch, num_devices=self._mesh.num_devices())
        size = layout.mesh.size
        names = [
            f"devices {i * size} to {(i + 1) * size - 1} (mesh {layout.mesh})"
            for i in range(self._num_meshes)
        ]
        return PlacedStages(names, functools.partial(self._backends, layout, names))

    def layout(self, task: Task, batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """Returns the mesh of a stage and the layout of its tensors; needs no device.

        Args:
          task: the task.
          batch: signature of a micro-batch.
          num_devices: number of devices of all stages together; None: as many as the meshes need.

        Raises:
          LayoutError: mesh and rules do not fit the model or the devices.
        """
        asked = self._mesh.size_asked_for()
        if num_devices is not None:
            of_stage = num_devices // self._num_meshes
            if of_stage < (asked or 1):
                needed = self._num_meshes * (asked or 1)
                raise ExecutionError(
                    f"{rows_of_stages(self.num_stages, self.num_replicas)} on "
                    f"meshes of {asked or 1} need {needed} devices, "
                    f"but there are {num_devices}: set a smaller execution.num_stages or "
                    f"execution.stages_on.mesh, or --cpu_devices={needed}"
                )
            num_devices = of_stage
        try:
            return self._mesh.layout(task, batch, num_devices=num_devices)
        except LayoutError as error:
            raise LayoutError(f"on the mesh of a stage, for a micro-batch: {error}") from None

    def _backends(
        self, layout: MeshLayout, names: Sequence[str], plan: PipelinePlan
    ) -> list[list[StageBackend]]:
        warn_of_idle_axes(layout)
        compiles = plan.xla == "clusters"
        meshes = [
            MeshBackend(name, layout, self._mesh.make(layout.mesh, i), compiles=compiles)
            for i, name in enumerate(names)
        ]
        first = range(0, self._num_meshes, plan.num_devices)
        return [
            [meshes[f + device_of(s.index, plan.num_devices)] for s in plan.stage_plan.stages]
            for f in first
        ]

    def activation_dtype(self, dtype: str) -> str:
        """See `StagePlacement`."""
        return str(self.params.used_dtype(dtype))
