"""A mesh of devices and its rules, as an execution or the stages of a pipeline have them."""

from __future__ import annotations

from typing import Any, Literal

from absl import logging

from tekso.framework.cluster import Cluster
from tekso.framework.execution.mesh import activations, mesh_devices, presets
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape
from tekso.framework.params import Configurable, param
from tekso.framework.signature import Signature
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

    def used_dtype(self, dtype: str) -> str:
        """Returns the type of activations, given `run.activation_dtype`."""
        return "bfloat16" if self.activation_dtype == "bfloat16" else dtype


class ShardingMesh:
    """One or several meshes with the same axes and rules, on devices that follow each other.

    Args:
      params: axes and rules.
      num_meshes: number of meshes.
      path: path of the Params in an experiment, for errors.
    """

    def __init__(self, params: MeshParams, *, num_meshes: int = 1, path: str = "execution") -> None:
        self._params, self._num_meshes, self._path = params, num_meshes, path
        self._device_type = "CPU"
        self._cpu_devices: int | None = None  # all
        self._cluster: Cluster | None = None

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._cluster = cluster

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """Sets up the devices of all meshes; see `Execution`."""
        size, self._cpu_devices = self.size_asked_for(), cpu_devices
        self._device_type = mesh_devices.setup(
            None if size is None else size * self._num_meshes, tpu, cpu_devices, self._cluster
        )

    def num_devices(self) -> int:
        """Returns the number of devices; known after `setup_devices`."""
        return mesh_devices.count(self._device_type, cpu_devices=self._cpu_devices)

    def have_cores(self) -> bool:
        """Returns whether all devices are CPU devices with a core of their own."""
        return self._device_type == "CPU" and mesh_devices.have_cores(self._cluster)

    def size_asked_for(self) -> int | None:
        """Returns the number of devices of the mesh in the Params; None if it is not set."""
        mesh = self._params.mesh
        return None if mesh is None else MeshShape.parse(mesh, params=self._path).size

    def make(self, shape: MeshShape, number: int = 0) -> Any:
        """Returns a DTensor mesh; known after `setup_devices`.

        Args:
          shape: its axes.
          number: its number among the meshes.
        """
        return mesh_devices.make_mesh(shape, self._device_type, first=number * shape.size)

    def layout(self, task: Task, batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """Returns the layout of the tensors of a task; needs no device.

        Args:
          task: the task.
          batch: signature of the examples that are computed together.
          num_devices: number of devices; None for the number that the mesh needs.

        Raises:
          LayoutError: mesh and rules do not fit the model or the devices.
        """
        p = self._params
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
            params=self._path,
        )
        layout.check(specs, activations=constrained)
        return layout


def warn_of_idle_axes(layout: MeshLayout) -> None:
    """Logs a warning if an axis of a mesh shards nothing."""
    idle, params = layout.idle_axes(), layout.mesh.params
    if idle:
        logging.warning(
            "%s.mesh %s: no tensor is sharded over axis %s, so all its devices compute the same; "
            "add a rule for it to %s.rules, or set %s.slots_axis",
            params,
            layout.mesh,
            " and ".join(idle),
            params,
            params,
        )
