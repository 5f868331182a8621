"""Counts the collectives of a training step on a mesh, in the compiled program.

DTensor compiles the step for a mesh of any size. Nothing runs: no device of the mesh is in this
process, so DTensor compiles the program and never starts it. No weight is allocated either: a
variable there has a shape and a layout, but no elements.

The program is compiled as for CPU and GPU meshes. There DTensor implements a reduce-scatter by an
all-reduce. It implements an all-gather by summing zero-padded shards, which is counted as an
all-gather (partitioned_program.py).
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

from tekso.framework.execution.mesh.layouts import Layout, MeshLayout, MeshShape
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.workarounds import compiler
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.partitioned_program import Exchange, PartitionedProgram
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.task import Task

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute", "broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one axis in a step.

    Attributes:
      kind: one of KINDS.
      axis: the mesh axis of the collective; "data+model" for two axes at once.
      count: number of tensors exchanged in a step.
      bytes: bytes of these tensors on one device. all-reduce: the tensor that is reduced;
        all-gather: the result; reduce-scatter: the tensor before it is scattered; all-to-all and
        permute: the device's shard.
    """

    kind: str
    axis: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """All collectives of a step.

    Attributes:
      collectives: sums by axis and kind.
      unknown_loops: loops whose number of iterations cannot be read from the program; they are
        counted as one iteration.
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
    """Returns the collectives of a training step; allocates no tensors.

    The step is compiled in this process, as before the first step of training.

    Args:
      task: the task.
      learner: the learner.
      layout: mesh and rules; must be legal.
      batch: shape and dtype of every array of the global batch.
      activation_dtype: as in MeshSharded.Params.

    Raises:
      ExecutionError: DTensor cannot compile the step for this layout.
    """
    compiler.choose_passes()  # as a run does
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
    """Returns a mesh without a device in this process; only the type of its devices is used."""
    numbers = np.arange(shape.size).reshape([size for _, size in shape.axes])
    return Mesh(list(shape.names), numbers, [], [], global_devices=["/device:CPU:0"])


class _Nowhere(Placement):
    """Places tensors on a mesh outside this process: shapes, dtypes and layouts, no elements."""

    def place(self, part: Any, shape: Any, axes: Layout, dtype: Any) -> tf.Tensor:
        """See `Placement`; does not call `part`."""
        layout, shape = self.layout(axes), list(shape)
        return dtensor.call_with_layout(tf.zeros, layout, shape, dtype=tf.as_dtype(dtype))

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """See `Placement`; the tensor never gets a value."""
        return x
