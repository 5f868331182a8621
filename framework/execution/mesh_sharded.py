"""Mesh-sharded execution: any dim of any tensor over any axis of a mesh of devices.

    execution.mesh   data:2;model:4                        axes of the mesh and their sizes
    execution.rules  batch:data;mlp:model;heads:model      which dim of a tensor lies on which axis

One SPMD program over TensorFlow's DTensor runs on all devices. Rules are about names of dims, never
about layers; what they make of every weight is shown by `--mode=inspect_sharding`.

Source: Shazeer et al. 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers".
"""

from __future__ import annotations

from typing import Literal

from absl import logging

from tekso.framework.execution.base import (
    Execution,
    ExecutionProgram,
    Signature,
    part_of,
)
from tekso.framework.execution.mesh import activations, mesh_devices, presets
from tekso.framework.execution.mesh.cluster import Cluster
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.step import Step
from tekso.framework.learning_step import LearnerBase
from tekso.framework.params import param
from tekso.framework.primitives.fusion import Fuse, MarkedFusion, no_fusion
from tekso.framework.task import Task


class MeshSharded(Execution):
    """One program over a mesh of devices, by layout rules."""

    _device_type = "CPU"
    _cpu_devices: int | None = None  # all that there are
    _cluster: Cluster | None = None

    class Params(Execution.Params):
        """Params of MeshSharded."""

        mesh: str | None = param(
            'Axes and their sizes: "data:2;model:4". None: all devices, as the preset says.',
            default=None,
        )
        rules: str = param(
            'Which dims lie on which axes, "batch:data;mlp:model", or the name of a preset: data, '
            "fsdp, tensor, 2d.",
            default="data",
        )
        weights_axis: str | None = param(
            "Axis over which weights are split as well between steps, and gathered for use (fully "
            "sharded weights, ZeRO-3).",
            default=None,
        )
        slots_axis: str | None = param(
            "Axis over which the optimizer's slots are split as well, and the update with them "
            "(weight-update sharding, ZeRO-1).",
            default=None,
        )
        activation_dtype: Literal["float32", "bfloat16"] = param(
            "Type in which a step computes; float32 weights stay as masters.", default="float32"
        )
        decode_on: Literal["one_device", "mesh"] = param(
            "Where texts are searched for, drawn and scored. one_device: the weights are gathered "
            "to it; faster, and begins sooner. mesh: for models that no device holds, where rules "
            "split their weights; every shape of a batch is compiled for the mesh.",
            default="one_device",
        )
        xla: Literal["auto", "none", "clusters"] = param(
            "What XLA compiles: nothing, or large elementwise clusters between matrix products, "
            "on every device anew. auto: clusters on CPU if every device has a core of its own "
            "(else training would begin late), nothing in stages of a pipeline.",
            default="auto",
            old_values={"stretches": "clusters"},
        )

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._cluster = cluster

    def setup_devices(
        self, *, tpu: str | None = None, cpu_devices: int | None = None, num_meshes: int = 1
    ) -> None:
        """See `Execution`; with devices for so many meshes."""
        size, self._cpu_devices = self.size_asked_for(), cpu_devices
        self._device_type = mesh_devices.setup(
            None if size is None else size * num_meshes, tpu, cpu_devices, self._cluster
        )

    @property
    def device_type(self) -> str:
        """What the devices are; known after `setup_devices`."""
        return self._device_type

    def num_devices(self) -> int:
        """Returns how many devices there are; known after `setup_devices`."""
        return mesh_devices.count(self._device_type, cpu_devices=self._cpu_devices)

    def size_asked_for(self) -> int | None:
        """Returns the number of devices of the mesh, as far as it is written out."""
        return None if self.params.mesh is None else MeshShape.parse(self.params.mesh).size

    def build(
        self, task: Task, learner: LearnerBase, *, seed: int, batch: Signature
    ) -> ExecutionProgram:
        """See `Execution`."""
        accumulation = learner.params.accumulation_steps
        part = part_of(batch, accumulation)
        layout = self.layout(task, part, num_devices=self.num_devices())
        warn_of_idle_axes(layout, "execution")
        mesh = mesh_devices.make_mesh(layout.mesh, self._device_type)
        step = Step(task, learner, seed=seed, dtype=self.params.activation_dtype)
        return MeshProgram(
            step, Placement(mesh), layout, decode_on=self.params.decode_on, fuse=self._fuse()
        )

    def _fuse(self) -> Fuse:
        xla = self.params.xla
        if xla == "auto" and self._device_type == "CPU" and mesh_devices.have_cores(self._cluster):
            xla = "clusters"
        return MarkedFusion() if xla == "clusters" else no_fusion

    def layout(self, task: Task, batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """Returns how the tensors of a task lie; needs no device.

        Args:
          task: the task.
          batch: of the examples that are computed together.
          num_devices: how many there are; None for as many as the mesh asks for.

        Raises:
          LayoutError: mesh and rules do not fit the model or the devices.
        """
        p = self.params
        specs = task.specs()
        pinned = activations.of_task(task, batch)
        dims = {d for s in specs.values() for d in s.dims} | {
            d for t in pinned.values() for d in t[0]
        }
        layout = presets.resolve(
            p.rules,
            p.mesh,
            num_devices=num_devices,
            dims=sorted(d for d in dims if d is not None),
            weights_axis=p.weights_axis,
            slots_axis=p.slots_axis,
        )
        layout.check(specs, activations=pinned)
        return layout


def warn_of_idle_axes(layout: MeshLayout, params: str) -> None:
    """Logs a warning if nothing is split over an axis of a mesh.

    Args:
      layout: of all tensors.
      params: path of the Params that have the mesh and its rules.
    """
    idle = layout.idle_axes()
    if idle:
        logging.warning(
            "%s.mesh %s: nothing is split over %s, whose devices all do the same; %s.rules or "
            "%s.slots_axis can name it",
            params,
            layout.mesh,
            " and ".join(idle),
            params,
            params,
        )
