"""What devices of a mesh tell each other in a training step, counted in the compiled program.

DTensor compiles the step for the mesh that is asked for, of any size, and nothing runs: none of the
mesh's devices is in this process, so that DTensor compiles the program and never starts it. No
weight exists either: a variable there has a shape and a layout, and no elements.

The program is that of CPU and GPU meshes. There DTensor reduces where a TPU would reduce and
scatter at once, and it gathers by adding parts up, which is counted as a gather: `spmd_program.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.dtensor.python.layout import Mesh
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from tekso.framework.execution.base import Signature
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout, MeshShape
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.step import Step
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.partitioned_program import Exchange, PartitionedProgram
from tekso.framework.task import Task

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute", "broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one axis in a step.

    Attributes:
      kind: one of KINDS.
      axis: the mesh axis along which devices exchange; "data+model" for two at once.
      count: how many tensors are exchanged so in a step.
      bytes: of these tensors, on one device. all-reduce: of the tensor that is reduced; all-gather:
        of what is gathered; reduce-scatter: of what is reduced and scattered; all-to-all and
        permute: of the device's own part.
    """

    kind: str
    axis: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """All that is exchanged in a step.

    Attributes:
      collectives: by axis and kind.
      unknown_loops: loops whose length the program does not tell; they are counted as run once.
    """

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()


def of_step(
    task: Task,
    learner: LearnerBase,
    layout: MeshLayout,
    batch: Signature,
    *,
    activation_dtype: str = "float32",
) -> StepCollectives:
    """Returns what a training step exchanges. Nothing is allocated, whatever the sizes.

    It compiles as the first step of training does, in this process.

    Args:
      task: the task.
      learner: the learner.
      layout: mesh and rules, checked already.
      batch: shape and dtype of every array of the global batch.
      activation_dtype: as in MeshSharded.Params.

    Raises:
      ExecutionError: DTensor cannot compile the step for this layout.
    """
    mesh_devices.choose_passes()  # as a run does
    mesh = _mesh_elsewhere(layout.mesh)
    step = Step(task, learner, seed=0, dtype=activation_dtype)
    program = MeshProgram(step, _Nowhere(mesh), layout)
    arrays = {
        name: np.broadcast_to(np.zeros((), tf.as_dtype(dtype).as_numpy_dtype), tuple(shape))
        for name, (shape, dtype) in batch.items()
    }
    with dtensor.default_mesh(mesh):
        program.initialize()
        before = set(context.context().list_function_names())
        program.train_step(arrays, 0)
        made = set(context.context().list_function_names()) - before
    functions = {name: context.context().get_function_def(name) for name in made}
    spmd = PartitionedProgram(functions.__getitem__, layout.mesh)
    found: list[Exchange] = []
    for name, function in functions.items():
        if any(node.op == "StatefulPartitionedCall" and "_mesh" in node.attr
               for node in function.node_def):  # fmt: skip
            found += spmd.exchanges(name, times=program.times_run(name))
    return _summed(found, layout.mesh, tuple(spmd.unknown_loops))


def _summed(
    found: list[Exchange], mesh: MeshShape, unknown_loops: tuple[str, ...]
) -> StepCollectives:
    sums: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}
    for one in found:
        count, num_bytes = sums.get((one.axes, one.kind), (0, 0))
        sums[one.axes, one.kind] = (count + one.times, num_bytes + one.times * one.bytes)
    place = {axis: i for i, axis in enumerate(mesh.names)}
    order: Callable[[Any], Any] = lambda key: (  # noqa: E731
        len(key[0]), [place[axis] for axis in key[0]], KINDS.index(key[1])
    )  # fmt: skip
    return StepCollectives(
        tuple(Collective(key[1], "+".join(key[0]), *sums[key]) for key in sorted(sums, key=order)),
        unknown_loops=unknown_loops,
    )


def _mesh_elsewhere(shape: MeshShape) -> Mesh:
    """A mesh none of whose devices is in this process; only the type of a device is looked at."""
    numbers = np.arange(shape.size).reshape([size for _, size in shape.axes])
    return Mesh(list(shape.names), numbers, [], [], global_devices=["/device:CPU:0"])


class _Nowhere(Placement):
    """Places tensors on a mesh elsewhere: they have shapes, dtypes and layouts, and no elements."""

    def place(self, part: Any, shape: Any, axes: Layout, dtype: Any) -> tf.Tensor:
        """See `Placement`; asks for no part."""
        layout, shape = self.layout(axes), list(shape)
        return dtensor.call_with_layout(tf.zeros, layout, shape, dtype=tf.as_dtype(dtype))

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """See `Placement`; no value will come."""
        return x
