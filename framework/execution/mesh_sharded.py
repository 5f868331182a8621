"""Mesh-sharded execution: shards any dim of any tensor over any axis of a mesh of devices.

    execution.mesh   data:2;model:4                        axes of the mesh and their sizes
    execution.rules  batch:data;mlp:model;heads:model      the axis that shards each dim

One SPMD program on TensorFlow's DTensor runs on all devices. Rules refer to the names of dims,
never to layers. `--mode=inspect_sharding` shows the sharding of every weight.

Source: Shazeer et al. 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers".
"""

from __future__ import annotations

from typing import Literal

from absl import logging

from tekso.framework.cluster import Cluster
from tekso.framework.execution.base import (
    Execution,
    ExecutionProgram,
    Signature,
    part_of,
)
from tekso.framework.execution.mesh import activations, mesh_devices, presets
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.params import Configurable, param
from tekso.framework.primitives.fusion import Fuse, MarkedFusion, no_fusion
from tekso.framework.step import Step
from tekso.framework.task import Task


class MeshParams(Configurable.Params):
    """Params of a mesh and its rules, for an execution or for the stages of a pipeline."""

    mesh: str | None = param(
        'Axes and their sizes: "data:2;model:4". None: all devices, as the preset defines.',
        default=None,
    )
    rules: str = param(
        'The axis that shards each dim: "batch:data;mlp:model"; or the name of a preset: data, '
        "fsdp, tensor, 2d.",
        default="data",
    )
    weights_axis: str | None = param(
        "Axis that also shards the weights between steps; they are all-gathered for use (fully "
        "sharded weights, ZeRO-3).",
        default=None,
    )
    slots_axis: str | None = param(
        "Axis that also shards the optimizer slots and the update (weight-update sharding, "
        "ZeRO-1).",
        default=None,
    )
    activation_dtype: Literal["float32", "bfloat16"] = param(
        "Set run.activation_dtype instead, which applies to every execution. bfloat16 here, as "
        "earlier versions set it, means the same.",
        default="float32",
    )


class MeshSharded(Execution):
    """One program on a mesh of devices, sharded by rules on dimension names."""

    _device_type = "CPU"
    _cpu_devices: int | None = None  # all
    _cluster: Cluster | None = None

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

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._cluster = cluster

    def setup_devices(
        self, *, tpu: str | None = None, cpu_devices: int | None = None, num_meshes: int = 1
    ) -> None:
        """See `Execution`; sets up devices for `num_meshes` meshes."""
        size, self._cpu_devices = self.size_asked_for(), cpu_devices
        self._device_type = mesh_devices.setup(
            None if size is None else size * num_meshes, tpu, cpu_devices, self._cluster
        )

    @property
    def device_type(self) -> str:
        """Type of the devices ("CPU", "GPU" or "TPU"); known after `setup_devices`."""
        return self._device_type

    def num_devices(self) -> int:
        """Returns the number of devices; known after `setup_devices`."""
        return mesh_devices.count(self._device_type, cpu_devices=self._cpu_devices)

    def size_asked_for(self) -> int | None:
        """Returns the number of devices of `params.mesh`; None if it is not set."""
        return None if self.params.mesh is None else MeshShape.parse(self.params.mesh).size

    def program(self, step: Step, batch: Signature) -> ExecutionProgram:
        """See `Execution`."""
        part = part_of(batch, step.learner.params.accumulation_steps)
        layout = self.layout(step.task, part, num_devices=self.num_devices())
        warn_of_idle_axes(layout, "execution")
        mesh = mesh_devices.make_mesh(layout.mesh, self._device_type)
        return MeshProgram(
            step, Placement(mesh), layout, decode_on=self.params.decode_on, fuse=self._fuse()
        )

    def activation_dtype(self, dtype: str) -> str:
        """See `Execution`."""
        return "bfloat16" if self.params.activation_dtype == "bfloat16" else dtype

    def _fuse(self) -> Fuse:
        xla = self.params.xla
        if xla == "auto" and self._device_type == "CPU" and mesh_devices.have_cores(self._cluster):
            xla = "clusters"
        return MarkedFusion() if xla == "clusters" else no_fusion

    def layout(self, task: Task, batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """Returns the layout of the tensors of a task; needs no device.

        Args:
          task: the task.
          batch: signature of the examples that are computed together.
          num_devices: number of devices; None for the number that the mesh needs.

        Raises:
          LayoutError: mesh and rules do not fit the model or the devices.
        """
        p = self.params
        specs = task.specs()
        constrained = activations.of_task(task, batch)
        dims = {d for s in specs.values() for d in s.dims} | {
            d for t in constrained.values() for d in t[0]
        }
        layout = presets.resolve(
            p.rules,
            p.mesh,
            num_devices=num_devices,
            dims=sorted(d for d in dims if d is not None),
            weights_axis=p.weights_axis,
            slots_axis=p.slots_axis,
        )
        layout.check(specs, activations=constrained)
        return layout


def warn_of_idle_axes(layout: MeshLayout, params: str) -> None:
    """Logs a warning if an axis of a mesh shards nothing.

    Args:
      layout: layout of all tensors.
      params: path of the Params that define the mesh and its rules.
    """
    idle = layout.idle_axes()
    if idle:
        logging.warning(
            "%s.mesh %s: nothing is sharded over %s, so its devices all compute the same; name it "
            "in %s.rules or %s.slots_axis",
            params,
            layout.mesh,
            " and ".join(idle),
            params,
            params,
        )
