"""The backend of a stage that is itself sharded over a mesh of devices.

    stage 0   CPU:0 CPU:1   model:2           a value moves as its shards, device to device,
    stage 1   CPU:2 CPU:3   model:2           and keeps its layout

TensorFlow 2.21 cannot run one program over the devices of several meshes. A tensor is therefore
unpacked into its shards on one mesh, and packed from them on the next.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.context import Examples
from tekso.framework.execution.mesh import step_context
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.mesh.placement import Placement, hashable
from tekso.framework.execution.mesh.step_errors import compiled, explained, ops_of_all
from tekso.framework.execution.pipeline.graph_cut import Subgraph
from tekso.framework.execution.pipeline.stage_backend import Kind, Part, Specs, StageBackend
from tekso.framework.execution.shards import Slices
from tekso.framework.execution.workarounds.compiler import SERIAL
from tekso.framework.execution.workarounds.repeated_sums import refuse_repeated_sums
from tekso.framework.execution.workarounds.retracing import recompiled
from tekso.framework.execution.workarounds.tensors import TOO_MANY_TO_FOLD, new_variable
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported
from tekso.framework.primitives.fusion import MarkedFusion, no_fusion
from tekso.framework.step import Flat
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """The shards of a tensor that was unpacked from its mesh.

    Attributes:
      parts: the shard of every device, in the order of the mesh.
      axes: layout of the tensor.
    """

    parts: tuple[tf.Tensor, ...]
    axes: Layout


class MeshBackend(StageBackend):
    """A mesh of devices.

    Args:
      name: name of its devices, for errors and drawings.
      layout: axes and rules.
      mesh: the DTensor mesh of its devices.
      compiles: whether XLA compiles elementwise clusters.
    """

    device = "/device:CPU:0"

    def __init__(self, name: str, layout: MeshLayout, mesh: Any, *, compiles: bool) -> None:
        self.name, self.layout = name, layout
        self._placement = Placement(mesh)
        self._devices: list[str] = list(mesh.local_devices())
        self._where = f"a stage on a {layout}"
        self._traced: list[weakref.ref[tf.Graph]] = []
        self._called: set[Subgraph] = set()  # their compiled programs have been searched
        self.fuse = self.fuse_update = MarkedFusion() if compiles else no_fusion

    # --- tensors, from the host ---

    def put(self, array: Any) -> tf.Tensor:
        """See `StageBackend`."""
        array = np.asarray(array)
        axis = step_context.batch_axis(self.layout, len(array))
        with SERIAL:
            return self._placement.put(array, (axis,) + (None,) * (array.ndim - 1))

    def scalar(self, value: Any, dtype: Any) -> tf.Tensor:
        """See `StageBackend`; returns a vector of copies (see `Placement.put_changing`)."""
        if tf.is_tensor(value):
            return self.spread(tf.fill([TOO_MANY_TO_FOLD], tf.cast(value, dtype)))
        with SERIAL:
            return self._placement.put_number(value, tf.as_dtype(dtype).as_numpy_dtype)

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return self._pack([x] * len(self._devices), (None,) * x.shape.rank)

    def send(self, x: tf.Tensor) -> Shards:
        """See `StageBackend`."""
        with SERIAL:
            return Shards(tuple(dtensor.unpack(x)), axes_of(x))

    def take(self, sent: Shards) -> tf.Tensor:
        """See `StageBackend`."""
        return self._pack(sent.parts, sent.axes)

    def _pack(self, parts: Sequence[tf.Tensor], axes: Layout) -> tf.Tensor:
        own = []
        for part, device in zip(parts, self._devices, strict=True):
            with tf.device(device):
                own.append(tf.identity(part))
        with SERIAL:
            return dtensor.pack(own, self._placement.layout(axes))

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        with SERIAL:
            return self._placement.local(x)

    def gather(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        with SERIAL:
            return tf.constant(self._placement.to_host(x))

    # --- variables ---

    def _axes(self, spec: WeightSpec, kind: Kind) -> Layout:
        """How a variable is sharded."""
        is_weight = kind == "weight"
        return self.layout.of_stored_weight(spec) if is_weight else self.layout.of_slot(spec)

    def _placed(self, part: Part, spec: WeightSpec, kind: Kind) -> tf.Tensor:
        return self._placement.place(part, spec.shape, self._axes(spec, kind), spec.dtype)

    def variable(self, part: Part, spec: WeightSpec, kind: Kind) -> tf.Variable:
        """See `StageBackend`."""
        with SERIAL:
            return new_variable(self._placed(part, spec, kind))

    def assign(self, variable: tf.Variable, part: Part, spec: WeightSpec, kind: Kind) -> None:
        """See `StageBackend`."""
        with SERIAL:
            variable.assign(self._placed(part, spec, kind))

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """See `StageBackend`."""
        with SERIAL:
            return variable.read_value()

    def shards(
        self, variable: tf.Variable, spec: WeightSpec, kind: Kind
    ) -> Iterator[tuple[Slices, tf.Tensor]]:
        """See `StageBackend`."""
        axes = self._axes(spec, kind)
        with SERIAL:
            local = self._placement.local_shards(variable.read_value(), axes)
        for where, _ in self._placement.shards(spec.shape, axes):
            yield where, local[hashable(where)]

    # --- functions ---

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `StageBackend`."""
        return compiled(function, self._where)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `StageBackend`.

        Raises:
          ExecutionError: DTensor cannot compile the function, or computes wrong products in it.
        """
        with SERIAL:
            made = self.started(function, *args)
            first = next((x for x in tf.nest.flatten(made) if tf.is_tensor(x)), None)
            parts = [] if first is None else dtensor.unpack(first)  # waits; see `SERIAL`
        for part in parts:
            tf.identity(part)  # if the tensor is not computed yet, this waits without any lock
        return made

    def started(self, function: Callable[..., Any], *args: Any) -> Any:
        """Starts a compiled function, with the lock; returns its result before it is computed.

        Raises:
          ExecutionError: see `call`.
        """
        cut = function if isinstance(function, Subgraph) else None
        if cut is not None and cut.has_loops:
            function = recompiled(cut, cut.trace_again)
        made = explained(function, self._where, traced=self._traced)(*args)
        if cut is not None and cut not in self._called:
            self._called.add(cut)
            refuse_repeated_sums(ops_of_all(self._traced))
        return made

    def check(self, graph: tf.Graph) -> None:
        """See `StageBackend`."""
        self._traced.append(weakref.ref(graph))
        refuse_unsupported(graph)

    def trace(self, function: Callable[..., Any], *args: Any) -> None:
        """See `StageBackend`; does nothing, because DTensor traces a function when it runs."""

    # --- in the graph of a function ---

    def scalar_spec(self, dtype: tf.DType) -> tf.TensorSpec:
        """See `StageBackend`."""
        return tf.TensorSpec((TOO_MANY_TO_FOLD,), dtype)

    def scalar_value(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return x[0]

    def condition(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return tf.reshape(self.scalar_value(x), [1])

    def context(self, weights: Flat, specs: Specs, examples: Examples) -> MeshContext:
        """See `StageBackend`; it knows how the weights are sharded."""
        ctx = step_context.context(self._placement, self.layout, examples, self.fuse)
        ctx.register_layouts(
            list(weights.values()), [self.layout.of_weight(specs[path]) for path in weights]
        )
        return ctx

    def used(self, weights: Flat, specs: Specs) -> Flat:
        """See `StageBackend`; all-gathers weights that are sharded only in storage."""
        ctx = MeshContext(self._placement, self.layout)
        return step_context.used(self.layout, specs, weights, ctx)

    def stored(self, x: tf.Tensor, spec: WeightSpec, kind: Kind) -> tf.Tensor:
        """See `StageBackend`."""
        return self._placement.reshard(x, self._axes(spec, kind))

    def replicated(self, x: Any) -> tf.Tensor:
        """See `StageBackend`."""
        x = tf.convert_to_tensor(x)
        return self._placement.reshard(x, (None,) * x.shape.rank)


def axes_of(x: tf.Tensor) -> Layout:
    """Returns how a tensor on a mesh is sharded."""
    specs = dtensor.fetch_layout(x).sharding_specs
    return tuple(None if spec == dtensor.UNSHARDED else spec for spec in specs)
