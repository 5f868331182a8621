"""Mesh-sharded execution: any dim of any tensor over any axis of a mesh of devices.

    execution.mesh   data:2;model:4                        axes of the mesh and their sizes
    execution.rules  batch:data;mlp:model;heads:model      which dim of a tensor lies on which axis

One SPMD program over TensorFlow's DTensor runs on all devices. Rules are about names of dims, never
about layers; what they make of every weight is shown by `--mode=inspect_sharding`.

Source: Shazeer et al. 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers".
"""

from __future__ import annotations

import os
from typing import Any, Literal

from absl import logging

from tekso.framework.execution.base import (
    Execution,
    ExecutionError,
    Program,
    Signature,
    num_examples,
)
from tekso.framework.execution.mesh import activations, mesh_devices, presets
from tekso.framework.execution.mesh.cluster import Cluster
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.params import param


class MeshSharded(Execution):
    """One program over a mesh of devices, by layout rules."""

    _device_type = "CPU"
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

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._cluster = cluster

    def setup_devices(
        self, *, tpu: str | None = None, cpu_devices: int | None = None, num_meshes: int = 1
    ) -> None:
        """See `Execution`; with devices for so many meshes."""
        # TensorFlow's default moves wrong values between two inner dims (on CPU and GPU).
        if not tpu:
            os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"
        # It would join sums over devices from before and after a loop that is between them.
        os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = "0"
        size = self.size_asked_for()
        self._device_type = mesh_devices.setup(
            None if size is None else size * num_meshes, tpu, cpu_devices, self._cluster
        )

    @property
    def device_type(self) -> str:
        """What the devices are; known after `setup_devices`."""
        return self._device_type

    def size_asked_for(self) -> int | None:
        """Returns the number of devices of the mesh, as far as it is written out."""
        return None if self.params.mesh is None else MeshShape.parse(self.params.mesh).size

    def build(self, task: Any, learner: Any, *, seed: int, batch: Signature) -> Program:
        """See `Execution`."""
        accumulation = learner.params.accumulation_steps
        layout = self.layout(
            task, part_of(batch, accumulation), num_devices=mesh_devices.count(self._device_type)
        )
        idle = layout.idle_axes()
        if idle:
            logging.warning(
                "execution.mesh %s: nothing is split over %s, whose devices all do the same; "
                "execution.rules or execution.slots_axis can name it",
                layout.mesh,
                " and ".join(idle),
            )
        mesh = mesh_devices.make_mesh(layout.mesh, self._device_type)
        return MeshProgram(
            task,
            learner,
            Placement(mesh),
            layout,
            activation_dtype=self.params.activation_dtype,
            seed=seed,
        )

    def layout(self, task: Any, batch: Signature, *, num_devices: int | None) -> MeshLayout:
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


def part_of(batch: Signature, parts: int) -> Signature:
    """Returns the signature of one of several equal parts of a batch.

    Raises:
      ExecutionError: the parts are not equal.
    """
    size = num_examples(batch)
    if size % parts:
        raise ExecutionError(
            f"input.batch_size {size} does not divide evenly over {parts} accumulation steps "
            "(learner.accumulation_steps)"
        )
    return {name: ((size // parts, *shape[1:]), dtype) for name, (shape, dtype) in batch.items()}
