"""Compiles a training step for a mesh, without its devices, for what is read from its program.

Nothing runs: no device of the mesh is in this process, so DTensor compiles the program and never
starts it. No weight is allocated either: a variable there has a shape and a layout, but no
elements. The program is compiled as for CPU and GPU meshes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Set
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
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.signature import Signature
from tekso.framework.step import Step

_TRACED = "__inference_"  # begins the names of functions that TensorFlow traces


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The functions of a step that DTensor has compiled.

    Attributes:
      functions: {name: definition}.
      times: {name of a function that is called from Python: number of calls in a step}.
    """

    functions: Mapping[str, Any]
    times: Mapping[str, int]


def compiled_step(
    step: Step, layout: MeshLayout, batch: Signature, *, fuse: Fuse = no_fusion
) -> CompiledStep:
    """Returns the functions of a training step; allocates no tensors.

    The step is compiled in this process, as before the first step of training.

    Args:
      step: the task, the learner and the type of activations.
      layout: mesh and rules; must be legal.
      batch: shape and dtype of every array of the global batch.
      fuse: marks the clusters that XLA compiles.

    Raises:
      ExecutionError: DTensor cannot compile the step for this layout.
    """
    compiler.choose_passes()  # as a run does
    mesh = mesh_elsewhere(layout.mesh)
    program = MeshProgram(step, Nowhere(mesh), layout, fuse=fuse)
    arrays = {
        name: np.broadcast_to(np.zeros((), tf.as_dtype(dtype).as_numpy_dtype), tuple(shape))
        for name, (shape, dtype) in batch.items()
    }
    with dtensor.default_mesh(mesh):
        program.initialize()
        return compiled_by(program, lambda: program.train_step(arrays, 0))


def compiled_by(program: MeshProgram, run: Callable[[], Any]) -> CompiledStep:
    """Returns the functions that DTensor compiles in the first training step of a program.

    Args:
      program: the program.
      run: runs this step.
    """
    before = functions()
    run()
    return compiled_since(before, program.times_run)


def functions() -> set[str]:
    """Returns the names of all functions in the function library of the process."""
    return set(context.context().list_function_names())


def compiled_since(before: Set[str], times_run: Callable[[str], int]) -> CompiledStep:
    """Returns the functions that DTensor has compiled.

    Args:
      before: `functions()` before it did.
      times_run: returns how often a step calls a function.
    """
    # DTensor also makes functions of single ops, which place the tensors of `compiled_step`.
    traced = {n: _definition(n) for n in functions() - before if n.startswith(_TRACED)}
    called = [name for name, f in traced.items() if any(map(runs_on_mesh, f.node_def))]
    return CompiledStep(_with_inner(called), {name: times_run(name) for name in called})


def _definition(name: str) -> Any:
    return context.context().get_function_def(name)


def _with_inner(names: Iterable[str]) -> dict[str, Any]:
    """Returns the definitions of functions and of all functions inside of them.

    The name of a loop is not always new: DTensor may give it that of a loop of an earlier program,
    whose functions are removed then, see workarounds/retracing.py.
    """
    found, open_names = {}, list(names)
    while open_names:
        if (name := open_names.pop()) not in found:
            found[name] = _definition(name)
            for node in found[name].node_def:
                for value in node.attr.values():
                    open_names += [f.name for f in (value.func, *value.list.func) if f.name]
    return found


def runs_on_mesh(node: Any) -> bool:
    """Returns whether a node calls a function that every device of a mesh runs."""
    return node.op == "StatefulPartitionedCall" and "_mesh" in node.attr


def mesh_elsewhere(shape: MeshShape) -> Mesh:
    """Returns a mesh without a device in this process; only the type of its devices is used."""
    numbers = np.arange(shape.size).reshape([size for _, size in shape.axes])
    return Mesh(list(shape.names), numbers, [], [], global_devices=["/device:CPU:0"])


class Nowhere(Placement):
    """Places tensors on a mesh outside this process: shapes, dtypes and layouts, no elements."""

    def place(self, part: Any, shape: Any, axes: Layout, dtype: Any) -> tf.Tensor:
        """See `Placement`; does not call `part`."""
        layout, shape = self.layout(axes), list(shape)
        return dtensor.call_with_layout(tf.zeros, layout, shape, dtype=tf.as_dtype(dtype))

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """See `Placement`; the tensor never gets a value."""
        return x
