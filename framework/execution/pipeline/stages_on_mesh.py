"""Shards every stage of a pipeline over its own mesh, and rejects unsupported Params."""

from __future__ import annotations

from typing import Any

from tekso.framework.execution.base import Signature
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout
from tekso.framework.execution.mesh_sharded import MeshSharded, warn_of_idle_axes
from tekso.framework.execution.pipeline.actions import device_of
from tekso.framework.execution.pipeline.mesh_backend import MeshBackend
from tekso.framework.execution.pipeline.plan import PipelinePlan, rows_of_stages
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.task import Task


class StagesOnMesh:
    """Shards every stage of a pipeline over its own mesh.

    Args:
      execution: mesh, rules and the other settings of a mesh.
      pipeline: Params of the pipeline.

    Raises:
      ExecutionError: other Params of the pipeline cannot be combined with stages on meshes.
    """

    def __init__(self, execution: MeshSharded, pipeline: Any) -> None:
        self._execution, self._params = execution, pipeline
        self._num_meshes = pipeline.num_stages * pipeline.num_replicas
        refused = []
        if pipeline.workers:
            refused.append(
                "execution.workers is set: DTensor cannot use the devices of workers; remove "
                "execution.workers or execution.stages_on"
            )
        if execution.params.decode_on != "one_device":
            refused.append(
                f"execution.stages_on.decode_on is {execution.params.decode_on!r}: remove it, "
                "since every stage has its own mesh, and decoding runs on one device"
            )
        if execution.params.xla == "clusters":
            refused.append(
                "execution.stages_on.xla is 'clusters': set execution.xla instead, which compiles "
                "the stages"
            )
        if refused:
            raise ExecutionError(f"execution.stages_on is set, and {'; and '.join(refused)}")

    def setup_devices(self, *, cpu_devices: int | None) -> None:
        """Sets up the threads and devices of all meshes."""
        self._execution.setup_devices(cpu_devices=cpu_devices, num_meshes=self._num_meshes)

    def layout(self, task: Task, batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """Returns the mesh of a stage and the layout of its tensors.

        Args:
          task: the task.
          batch: signature of a micro-batch.
          num_devices: number of devices of all stages together; None: as many as the meshes need.

        Raises:
          LayoutError: mesh and rules do not fit the model or the devices.
        """
        asked = self._execution.size_asked_for()
        if num_devices is not None:
            of_stage = num_devices // self._num_meshes
            if of_stage < (asked or 1):
                needed = self._num_meshes * (asked or 1)
                raise ExecutionError(
                    f"{rows_of_stages(self._params.num_stages, self._params.num_replicas)} on "
                    f"meshes of {asked or 1} need {needed} devices, "
                    f"but there are {num_devices}: set a smaller execution.num_stages or "
                    f"execution.stages_on.mesh, or --cpu_devices={needed}"
                )
            num_devices = of_stage
        try:
            return self._execution.layout(task, batch, num_devices=num_devices)
        except LayoutError as error:
            said = str(error).replace("execution.", "execution.stages_on.")
            raise LayoutError(f"on the mesh of a stage, for a micro-batch: {said}") from None

    def names(self, layout: MeshLayout) -> list[str]:
        """Returns a name for the devices of every stage, for messages."""
        size = layout.mesh.size
        return [
            f"devices {i * size} to {(i + 1) * size - 1} (mesh {layout.mesh})"
            for i in range(self._num_meshes)
        ]

    def num_devices(self) -> int:
        """Returns the number of devices."""
        return self._execution.num_devices()

    def backends(self, plan: PipelinePlan, layout: MeshLayout) -> list[list[StageBackend]]:
        """Returns the backends of the stages of every replica, [replica][stage]."""
        warn_of_idle_axes(layout, "execution.stages_on")
        device_type, compiles = self._execution.device_type, plan.xla == "clusters"
        meshes = [
            MeshBackend(layout, device_type, i, compiles=compiles) for i in range(self._num_meshes)
        ]
        first = range(0, self._num_meshes, plan.num_devices)
        return [
            [meshes[f + device_of(s.index, plan.num_devices)] for s in plan.stage_plan.stages]
            for f in first
        ]

    def activation_dtype(self, dtype: str) -> str:
        """Returns the type of activations, given `run.activation_dtype`."""
        return self._execution.activation_dtype(dtype)
