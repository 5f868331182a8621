"""The graphs that a device runs in a step of a pipeline on meshes, from the compiled programs.

The program of the pipeline runs a step, but its meshes are not in this process. So DTensor compiles
the functions of all stages and starts none of them. Nothing is allocated for weights, activations
and gradients: they have shapes and layouts only.

In one process, the functions of several meshes run one after the other (`MeshBackend`). So the step
is planned like one on a single mesh that runs the graphs of all stages: see `mesh_time.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.pipeline.actions import device_of
from tekso.framework.execution.pipeline.mesh_backend import MeshBackend, axes_of
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.workarounds import compiler
from tekso.framework.planning.compiled_step import (
    CompiledStep,
    Nowhere,
    compiled_since,
    functions,
    mesh_elsewhere,
)
from tekso.framework.planning.mesh_graphs import DeviceGraphs, device_graphs
from tekso.framework.signature import Signature
from tekso.framework.step import Step


def mesh_stage_graphs(
    step: Step, plan: PipelinePlan, layout: MeshLayout, batch: Signature
) -> DeviceGraphs:
    """Returns what a device of each mesh runs in a step: the graphs of all meshes together.

    Args:
      step: steps of the task and the learner.
      plan: plan of the pipeline.
      layout: mesh and rules of every stage; must be legal.
      batch: signature of the global batch.

    Raises:
      ExecutionError: DTensor cannot compile a function of a stage for this layout.
    """
    compiler.choose_passes()  # as a run does
    made = [
        [_Backend(layout, compiles=plan.xla == "clusters") for _ in range(plan.num_devices)]
        for _ in range(plan.num_replicas)
    ]
    backends: list[list[StageBackend]] = [
        [row[device_of(s.index, plan.num_devices)] for s in plan.stage_plan.stages] for row in made
    ]
    arrays = {
        name: np.broadcast_to(np.zeros((), tf.as_dtype(dtype).as_numpy_dtype), tuple(shape))
        for name, (shape, dtype) in batch.items()
    }
    program = PipelineProgram(step, plan, backends, batch=batch, replan=lambda _: plan)
    program.initialize()
    program.train_step(arrays, 0)
    meshes = list(itertools.chain(*made))
    calls = [call for mesh in meshes for call in mesh.calls()]
    return DeviceGraphs(
        [(count * times, graph) for count, made in calls for times, graph in made.graphs],
        [size for count, made in calls for size in count * list(made.collectives)],
        variables=sum(count * made.variables for count, made in calls),
        arrays=sum(mesh.placed for mesh in meshes),
        calls=sum(count for count, _ in calls),
    )


def _nothing(where: tuple[slice, ...]) -> np.ndarray:
    raise NotImplementedError("no part of a tensor exists on a mesh outside of this process")


class _Sent(NamedTuple):
    """A tensor on its way to another mesh: what is known of it."""

    shape: tf.TensorShape
    dtype: tf.DType
    axes: Layout


class _Backend(MeshBackend):
    """A mesh that is not in this process.

    Attributes:
      placed: number of tensors that were placed on it or sent from it.
    """

    def __init__(self, layout: MeshLayout, *, compiles: bool) -> None:
        super().__init__("", layout, mesh_elsewhere(layout.mesh), compiles=compiles)
        self._placement = Nowhere(self._placement.mesh)
        self.placed = 0
        self._graphs: dict[Callable[..., Any], DeviceGraphs] = {}
        self._counts: Counter[Callable[..., Any]] = Counter()

    def calls(self) -> list[tuple[int, DeviceGraphs]]:
        """Returns [(number of calls, what a call of this function runs)]."""
        return [(count, self._graphs[function]) for function, count in self._counts.items()]

    def put(self, array: Any) -> tf.Tensor:
        """See `StageBackend`."""
        self.placed += 1
        return super().put(array)

    def scalar(self, value: Any, dtype: Any) -> tf.Tensor:
        """See `StageBackend`."""
        if not tf.is_tensor(value):
            self.placed += 1
        return super().scalar(value, dtype)

    def send(self, x: tf.Tensor) -> Any:
        """See `StageBackend`."""
        self.placed += 1
        return _Sent(x.shape, x.dtype, axes_of(x))

    def take(self, sent: Any) -> tf.Tensor:
        """See `StageBackend`."""
        return self._zeros(sent.shape, sent.dtype, sent.axes)

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return self._zeros(x.shape, x.dtype, (None,) * x.shape.rank)

    def _zeros(self, shape: Any, dtype: tf.DType, axes: Layout) -> tf.Tensor:
        self.placed += 1
        with compiler.SERIAL:
            return self._placement.place(_nothing, shape, axes, dtype)

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return tf.zeros(x.shape, x.dtype)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `MeshBackend`; waits for nothing."""
        with compiler.SERIAL:
            before = functions() if function not in self._graphs else set()
            made = self.started(function, *args)
            if function not in self._graphs:
                self._graphs[function] = _graphs(compiled_since(before, lambda _: 1))
            self._counts[function] += 1
        return made


def _graphs(compiled: CompiledStep) -> DeviceGraphs:
    """Returns what a call runs; its arguments and results count like variables of a step."""
    signatures = [compiled.functions[name].signature for name in compiled.times]
    passed = sum(len(one.input_arg) + len(one.output_arg) for one in signatures)
    return device_graphs(compiled, variables=passed, arrays=0)
