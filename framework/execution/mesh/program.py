"""The program of a task on a mesh: DTensor variables, and steps compiled for all devices at once.

    stored weights ─► all-gather over the weights axis ─► theta
    theta, batch ─► loss, gradients                        one program, one set of devices
    gradients ─► resharded as the slots ─► learner.update ─► stored weights and slots

The batch is a tensor of the global size, sharded over the axis of "batch". So sums over it are sums
over the global batch, and the code has no explicit all-reduce.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.batch_part import BatchPart, Rows, RowsOf
from tekso.framework.batch_sums import Sums
from tekso.framework.context import Examples, Mode
from tekso.framework.execution.base import (
    Batch,
    ExecutionProgram,
    num_examples_of,
    parts_of,
    traced,
)
from tekso.framework.execution.batch_parts import size_of
from tekso.framework.execution.mesh import step_context
from tekso.framework.execution.mesh.calls import Calls, MeshCalls, OneDeviceCalls
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.mesh.placement import Placed, Placement, hashable
from tekso.framework.execution.mesh.step_errors import ADVICE, Traced, compiled, with_lines
from tekso.framework.execution.shards import Owners, Shard, chunks, cut_out, is_sliceable
from tekso.framework.execution.state import ReadKey, chosen
from tekso.framework.execution.workarounds.tensors import new_variable
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.state import State
from tekso.framework.step import Flat, Step
from tekso.framework.task import LossSums


class MeshLoss:
    """How a mesh computes the loss of a batch: each device has a part of every tensor.

    Attributes:
      where: describes the mesh in errors.
      advice: what to do if DTensor cannot compile the step.
    """

    advice = ADVICE

    def __init__(self, step: Step, layout: MeshLayout) -> None:
        self._step, self._layout = step, layout

    @property
    def where(self) -> str:
        """Describes the mesh in errors."""
        return f"execution.{self._layout}"

    def batch_axis(self, examples: int) -> str | None:
        """Returns the axis over which a number of examples is sharded when it is placed."""
        return step_context.batch_axis(self._layout, examples)

    def sums(self, weights: Flat, batch: Flat, ctx: MeshContext, step: tf.Tensor | int) -> LossSums:
        """Returns the loss sums of a part of a batch.

        Args:
          weights: weights as the layers use them, {path: tensor}.
          batch: the part.
          ctx: context of this part.
          step: number of the step.
        """
        return self._step.loss(weights, batch, ctx)


class MeshProgram(ExecutionProgram):
    """See `ExecutionProgram`; the state is one DVariable per key."""

    def __init__(
        self,
        step: Step,
        placement: Placement,
        layout: MeshLayout,
        *,
        loss: MeshLoss | None = None,
        decode_on: Literal["one_device", "mesh"] = "one_device",
        fuse: Fuse = no_fusion,
    ) -> None:
        super().__init__(step)
        self._placement, self._layout, self._fuse = placement, layout, fuse
        self._loss = loss or MeshLoss(step, layout)
        weights, slots = step.specs
        self._stored: State[Layout] = State(
            {path: layout.of_stored_weight(spec) for path, spec in weights.items()},
            {path: layout.of_slot(spec) for path, spec in slots.items()},
        )
        self._variables: State[Any] = State({}, {})
        self._graphs: list[list[weakref.ref[tf.Graph]]] = []  # by compiled function
        self._train = self._compiled(self._train_graph)
        self._part = self._compiled(self._part_graph)
        self._add = self._compiled(lambda a, b: tf.nest.map_structure(tf.add, a, b))
        self._update_all = self._compiled(self._update_graph)
        self._eval = self._compiled(self._eval_graph)
        self._calls: Calls
        if decode_on == "mesh":
            self._calls = MeshCalls(placement, f"execution.{layout}", self._begin_call)
            # Several processes must run their collectives in one order. Also, DTensor sometimes
            # fails to compile the loops of one function for several shapes.
            self.serialize_calls = True
        else:
            stored = self._compiled(self._evaluation_weights_graph)
            self._calls = OneDeviceCalls(placement, stored, step)

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        graphs: list[weakref.ref[tf.Graph]] = []
        self._graphs.append(graphs)
        return compiled(step, self._loss.where, advice=self._loss.advice, graphs=graphs)

    def _traced(self) -> Traced:
        """Returns the graphs of all steps so far."""
        return [graph for graphs in self._graphs for graph in graphs]

    # --- state ---

    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        """See `ExecutionProgram`."""
        self._calls.forget()
        variables, stored = self._variables.keyed(), self._stored.keyed()
        for key, spec in chosen(self.specs(), keys).items():
            shard = functools.partial(value, key)
            placed = self._placement.place(shard, spec.shape, stored[key], spec.dtype)
            if key in variables:
                variables[key].assign(placed)
            else:
                variables[key] = new_variable(placed)
        self._variables = State.of_keys(variables)

    def state(self, keys: Set[str] | None = None) -> dict[str, np.ndarray]:
        """See `ExecutionProgram`."""
        variables = chosen(self._variables.keyed(), keys)
        return {key: self._placement.to_host(v.read_value()) for key, v in variables.items()}

    def shards(self) -> Iterator[Shard]:
        """See `ExecutionProgram`; replicated shards are divided among the processes by bytes."""
        owners = Owners(self._placement.process)
        variables, stored = self._variables.keyed(), self._stored.keyed()
        for key, spec in self.specs().items():
            value, axes = variables[key].read_value(), stored[key]
            if not is_sliceable(spec.dtype):
                axes, value = (None,) * len(axes), self._placement.gathered(value)
            local = self._placement.local_shards(value, axes)
            for where, processes in self._placement.shards(spec.shape, axes):
                read = functools.partial(cut_out, local.get(hashable(where)), of=where)
                for shard in chunks(key, spec.shape, spec.dtype, read, where):
                    if owners.is_own(shard, processes):
                        yield shard

    def _read(self) -> State[tf.Tensor]:
        return self._variables.map(lambda variable: variable.read_value())

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `ExecutionProgram`; one program is called for each accumulation step."""
        self._calls.forget()
        with with_lines(self._traced):
            return self._train_step(batch, step)

    def _train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        parts = self._num_parts(num_examples_of(batch))
        placed, placed_step = self._place(batch, parts), self._placement.put_number(step, np.int64)
        if parts == 1:
            outputs = self._train(placed, placed_step)
        else:
            # No loop in the graph: the layers may have loops, and DTensor sometimes fails to
            # compile a second graph (with other shapes) after one with nested loops.
            numbers = [self._placement.put_number(i, np.int32) for i in range(parts)]
            total, weight = self._part(placed, placed_step, numbers[0])
            for number in numbers[1:]:
                total = self._add(total, self._part(placed, placed_step, number)[0])
            outputs = self._update_all(*total, weight, placed_step)
        return {name: self._placement.local(value) for name, value in outputs.items()}

    def own_rows(self, *, training: bool) -> RowsOf | None:
        """See `ExecutionProgram`: for each accumulation step, the rows of the local devices."""
        if self._placement.num_processes == 1:
            return None

        def rows(size: int) -> Rows:
            parts = self._num_parts(size) if training else 1
            size //= parts
            first, end = self._placement.extent(size, self._loss.batch_axis(size))
            if (first, end) == (0, size):
                return ((0, parts * size),)
            return tuple((i * size + first, i * size + end) for i in range(parts))

        return rows

    def _num_parts(self, size: int) -> int:
        return parts_of(size, self._step.learner.params.accumulation_steps)

    def times_run(self, function: str) -> int:
        """Returns how often a training step runs a function, given the function's compiled name."""
        is_part = self._part_graph.__name__ in function
        return self._step.learner.params.accumulation_steps if is_part else 1

    def _place(self, batch: Batch, parts: int = 1) -> dict[str, Placed]:
        """Places a batch: [examples, ...], or [parts, examples, ...] of several parts."""
        size = num_examples_of(batch) // parts
        axis = self._loss.batch_axis(size)
        first = self._placement.extent(size, axis)[0] if isinstance(batch, BatchPart) else 0
        placed = {}
        for name, array in batch.items():
            lead: Layout = (axis,)
            if parts > 1:
                array = array.reshape([parts, len(array) // parts, *array.shape[1:]])
                lead = None, axis
            axes = lead + (None,) * (array.ndim - len(lead))
            placed[name] = self._placement.put_batch(
                array, axes, dim=len(lead) - 1, size=size, first=first
            )
        return placed

    def _context(
        self,
        mode: Mode,
        step: tf.Tensor | int,
        offset: Any,
        size: int,
        batch_size: int | None = None,
    ) -> MeshContext:
        examples = Examples(mode, self._step.seed, step, offset, size, batch_size or size)
        return step_context.context(self._placement, self._layout, examples, self._fuse)

    def _used(self, weights: Mapping[str, tf.Tensor], ctx: MeshContext) -> Flat:
        """Returns the weights for a step: cast, and sharded by the rules alone."""
        specs = self._step.specs.weights
        return step_context.used(self._layout, specs, self._step.cast(weights), ctx)

    def _train_graph(self, placed: Mapping[str, Placed], step: tf.Tensor) -> Flat:
        batch = self._placement.batch(placed)
        total_weight = self._step.loss_weight(batch)
        found = self._gradients(batch, 0, step[0], total_weight, size_of(batch))
        return self._update(*found, total_weight, step[0])

    def _part_graph(self, placed: Mapping[str, Placed], step: tf.Tensor, number: tf.Tensor) -> Any:
        """Returns gradients and sums of one part of a batch, and the weight of the whole batch.

        The arrays of the batch are [parts, examples, ...].
        """
        batch = self._placement.batch(placed)
        whole = {name: tf.reshape(x, [-1, *x.shape[2:]]) for name, x in batch.items()}
        total_weight = self._step.loss_weight(whole)
        size = next(iter(batch.values())).shape[1]
        axis = step_context.batch_axis(self._layout, size)
        part = {
            name: self._placement.taken(x, number[0], (axis, *[None] * (x.shape.rank - 2)))
            for name, x in batch.items()
        }
        found = self._gradients(part, number[0] * size, step[0], total_weight, size_of(whole))
        return found, total_weight

    def _update_graph(
        self, gradients: Flat, sums: Sums, total_weight: tf.Tensor, step: tf.Tensor
    ) -> Flat:
        return self._update(gradients, sums, total_weight, step[0])

    def _update(
        self, gradients: Flat, sums: Sums, total_weight: tf.Tensor, step: tf.Tensor
    ) -> Flat:
        new, metrics = self._step.update(
            self._read(), gradients, sums, step, fuse=self._fuse, on_mesh=True
        )
        for variables, stored, values in zip(self._variables, self._stored, new, strict=True):
            for path, value in values.items():
                variables[path].assign(self._placement.reshard(value, stored[path]))
        report = self._step.report(sums, total_weight, metrics)
        return {name: self._placement.reshard(v, ()) for name, v in report.items()}

    def _gradients(
        self,
        batch: Flat,
        offset: Any,
        step: tf.Tensor | int,
        total_weight: tf.Tensor,
        num_examples: int,
    ) -> tuple[Flat, Sums]:
        """Returns the gradients and sums of a part of a batch of `num_examples`."""
        weights = {path: v.read_value() for path, v in self._variables.weights.items()}
        ctx = self._context("train", step, offset, size_of(batch), num_examples)

        def forward() -> tuple[LossSums, MeshContext]:
            return self._loss.sums(self._used(weights, ctx), batch, ctx, step), ctx

        trained = {path: weights[path] for path in self._step.trained}
        scale = self._step.loss_scale(self._variables.slots)
        gradients, sums = self._step.part_gradients(forward, total_weight, trained, scale)
        reshard, specs = self._placement.reshard, self._step.specs.weights
        # Sharded as the slots, as the update needs them.
        return {
            path: tf.nest.map_structure(
                lambda g, path=path: reshard(g, self._layout.of_slot(specs[path])), gradient
            )
            for path, gradient in gradients.items()
        }, sums

    # --- evaluation ---

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `ExecutionProgram`."""
        with with_lines(self._traced):
            sums = self._eval(self._place(batch))
            return {name: tuple(map(self._placement.local, pair)) for name, pair in sums.items()}

    def _eval_graph(self, placed: Mapping[str, Placed]) -> dict[str, Any]:
        batch = self._placement.batch(placed)
        ctx = self._context("eval", 0, 0, size_of(batch))
        weights = self._step.evaluation_weights(self._read())
        end = self._loss.sums(self._used(weights, ctx), batch, ctx, 0)
        sums = self._step.evaluation_sums(end, batch, ctx)
        return {
            name: tuple(self._placement.reshard(tf.convert_to_tensor(v), ()) for v in pair)
            for name, pair in sums.items()
        }

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`; runs on one device, or on the mesh."""
        return self._calls.call(function, inputs)

    def trace(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`; `call` uses the trace, unless it runs on the mesh."""
        called = self._calls.on_one_device(function)
        if called is None:
            return super().trace(function, *inputs)
        return traced(called, self._weight_types(), *inputs)

    def _begin_call(self, examples: int) -> tuple[Any, MeshContext]:
        ctx = self._context("decode", 0, 0, examples)
        weights = self._step.evaluation_weights(self._read())
        return self._step.task.theta(self._used(weights, ctx)), ctx

    def _evaluation_weights_graph(self) -> Flat:
        """Returns the evaluation weights, cast for use, sharded as they are stored."""
        weights = self._step.cast(self._step.evaluation_weights(self._read()))
        stored = self._stored.weights
        return {path: self._placement.reshard(w, stored[path]) for path, w in weights.items()}
