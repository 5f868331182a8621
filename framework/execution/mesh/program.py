"""The program of a task over a mesh: DTensor variables, and steps compiled for all devices at once.

    stored weights ─► as used (gathered over the axis that only stores them) ─► theta
    theta, batch ─► loss, gradients                        one program, one set of devices
    gradients ─► laid out as the weights are stored ─► learner.update ─► stored weights and slots

The batch is a tensor of its global size whose examples lie on the axis of "batch"; so sums over it
are sums over the global batch, and nothing is reduced by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework import task_results
from tekso.framework.context import Mode
from tekso.framework.execution.base import (
    LEARNER,
    WEIGHTS,
    Batch,
    ExecutionError,
    Program,
    checked_state,
)
from tekso.framework.execution.mesh import step_context
from tekso.framework.execution.mesh.calls import Calls, MeshCalls, OneDeviceCalls
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.step_errors import compiled
from tekso.framework.foreign_variables import refused
from tekso.framework.learning_step import select
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.task import LossSums
from tekso.framework.weight_spec import WeightSpec

Flat = dict[str, tf.Tensor]


class MeshProgram(Program):
    """See `Program`; the state is a DVariable a key."""

    def __init__(
        self,
        task: Any,
        learner: Any,
        placement: Placement,
        layout: MeshLayout,
        *,
        activation_dtype: str,
        seed: int,
        decode_on: Literal["one_device", "mesh"] = "one_device",
        fuse: Fuse = no_fusion,
    ) -> None:
        self._task, self._learner, self._placement, self._layout = task, learner, placement, layout
        self._activation_dtype, self._seed = tf.as_dtype(activation_dtype), seed
        self._fuse = fuse
        self._weight_specs = task.specs()
        self._trained = learner.trainable(self._weight_specs)
        self._slot_specs = learner.slots(self._weight_specs)
        self._stored = {
            **{WEIGHTS + p: layout.of_stored_weight(s) for p, s in self._weight_specs.items()},
            **{LEARNER + p: layout.of_slot(s) for p, s in self._slot_specs.items()},
        }
        self._variables: dict[str, Any] = {}
        self._train = self._compiled(self._train_graph)
        self._part = self._compiled(self._part_graph)
        self._add = self._compiled(lambda a, b: tf.nest.map_structure(tf.add, a, b))
        self._update_all = self._compiled(self._update_graph)
        self._eval = self._compiled(self._eval_graph)
        self._calls: Calls
        if decode_on == "mesh":
            self._calls = MeshCalls(placement, f"execution.{layout}", self._begin_call)
            # Several processes have to exchange in one order; and DTensor does not always manage to
            # compile the loops of one function for several shapes.
            self.calls_alike = True
        else:
            weights = self._compiled(self._evaluation_weights_graph)
            self._calls = OneDeviceCalls(placement, weights, task.theta, seed=seed)

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return compiled(step, f"execution.{self._layout}")

    # --- state ---

    def specs(self) -> dict[str, WeightSpec]:
        """See `Program`."""
        weights = {WEIGHTS + path: spec for path, spec in self._weight_specs.items()}
        return weights | {LEARNER + path: spec for path, spec in self._slot_specs.items()}

    def initialize(self) -> None:
        """See `Program`; every device draws what it holds."""
        for key, spec in self.specs().items():
            self._assign(key, functools.partial(spec.initial_value, self._seed))

    def restore(self, read: Callable[[str], np.ndarray], keys: Set[str]) -> None:
        """See `Program`."""
        values = checked_state(self.specs(), read, keys)
        for key in self.specs():
            self._assign(key, values.pop(key).__getitem__)

    def _assign(self, key: str, part: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        self._calls.forget()
        spec = self.specs()[key]
        placed = self._placement.place(part, spec.shape, self._stored[key], spec.dtype)
        if key in self._variables:
            self._variables[key].assign(placed)
        else:
            # All have one name: DTensor compiles the op that makes a variable once for each name.
            self._variables[key] = dtensor.DVariable(placed, trainable=False, name="state")

    def state(self) -> dict[str, np.ndarray]:
        """See `Program`."""
        whole = self._placement.whole
        return {key: whole(variable.read_value()) for key, variable in self._variables.items()}

    def _flat(self, prefix: str) -> Flat:
        return {
            key[len(prefix) :]: variable.read_value()
            for key, variable in self._variables.items()
            if key.startswith(prefix)
        }

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `Program`; parts of a batch are computed by one program, called for each."""
        self._calls.forget()
        parts = self._learner.params.accumulation_steps
        placed, placed_step = self._place(batch, parts), self._placement.put_number(step, np.int64)
        if parts == 1:
            outputs = self._train(placed, placed_step)
        else:
            # No loop in the graph: the layers may have loops, and DTensor does not always manage
            # to compile a second graph (of other shapes) after one with loops in loops.
            total = self._part(placed, placed_step, self._placement.put_number(0, np.int32))
            for i in range(1, parts):
                more = self._part(placed, placed_step, self._placement.put_number(i, np.int32))
                total = self._add(total, more)
            outputs = self._update_all(*total, placed_step)
        return {name: self._placement.local(value) for name, value in outputs.items()}

    def times_run(self, function: str) -> int:
        """Returns how often a training step runs one of its functions, by the compiled name."""
        is_part = self._part_graph.__name__ in function
        return self._learner.params.accumulation_steps if is_part else 1

    def _place(self, batch: Batch, parts: int = 1) -> Flat:
        """Places a batch, its examples split over their axis if that divides them."""
        sizes = {name: len(array) for name, array in batch.items()}
        if len(set(sizes.values())) != 1:
            raise ExecutionError(f"a batch with leading dims {sizes} has no number of examples")
        axis = step_context.batch_axis(self._layout, next(iter(sizes.values())) // parts)
        placed = {}
        for name, array in batch.items():
            if parts > 1:
                array = array.reshape([parts, len(array) // parts, *array.shape[1:]])
            lead: Layout = (None, axis) if parts > 1 else (axis,)
            placed[name] = self._placement.put(array, lead + (None,) * (array.ndim - len(lead)))
        return placed

    def _context(self, mode: Mode, step: Any, offset: Any, examples: int) -> MeshContext:
        return step_context.context(
            self._placement,
            self._layout,
            mode=mode,
            seed=self._seed,
            step=step,
            offset=offset,
            examples=examples,
            fuse=self._fuse,
        )

    def _theta(self, weights: Flat, ctx: MeshContext) -> Any:
        """Weights as they are used: laid out by the rules alone, in the type of activations."""
        dtype = self._activation_dtype
        used = step_context.used(self._layout, self._weight_specs, weights, ctx, dtype)
        return self._task.theta(used)

    def _train_graph(self, batch: Any, step: tf.Tensor) -> dict[str, tf.Tensor]:
        step = step[0]
        weights = self._flat(WEIGHTS)
        size = next(iter(batch.values())).shape[0]
        total_weight = task_results.loss_weight(self._task, batch)
        found = self._gradients(weights, batch, 0, step, total_weight, size)
        return self._update(weights, *found, step)

    def _part_graph(self, batch: Any, step: tf.Tensor, part: tf.Tensor) -> Any:
        """What one part of a batch [parts, examples, ...] adds to gradients and sums."""
        step, part = step[0], part[0]
        whole = {name: tf.reshape(x, [-1, *x.shape[2:]]) for name, x in batch.items()}
        parts, size = next(iter(batch.values())).shape[:2]
        total_weight = task_results.loss_weight(self._task, whole)
        axis = step_context.batch_axis(self._layout, size)
        chosen = {}
        for name, x in batch.items():
            axes = (axis, *[None] * (x.shape.rank - 2))
            chosen[name] = self._placement.taken(x, part, axes)
        offset = part * size
        return self._gradients(
            self._flat(WEIGHTS), chosen, offset, step, total_weight, parts * size
        )

    def _update_graph(self, gradients: Flat, sums: Any, step: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._update(self._flat(WEIGHTS), gradients, sums, step[0])

    def _update(
        self, weights: Flat, gradients: Flat, sums: Any, step: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        slots = self._flat(LEARNER)
        done = self._learner.update(
            self._weight_specs,
            weights,
            gradients,
            slots,
            step,
            loss=sums["total"],
            fuse=self._fuse,
        )
        new = {WEIGHTS + path: done.weights[path] for path in self._trained}
        new |= {LEARNER + path: value for path, value in done.slots.items()}
        means = {n: tf.math.divide_no_nan(*pair) for n, pair in sums["statistic"].items()}
        statistics = self._learner.without_frozen(self._task.new_statistics(weights, means))
        taken = tf.equal(done.metrics["nonfinite_consecutive"], 0)
        new |= {WEIGHTS + p: select(taken, v, weights[p]) for p, v in statistics.items()}
        for key, value in new.items():
            self._variables[key].assign(self._placement.relayout(value, self._stored[key]))
        metrics = {name: tf.math.divide_no_nan(*pair) for name, pair in sums["metric"].items()}
        outputs = {
            "loss": tf.math.divide_no_nan(*sums["loss"]),
            "total_loss": sums["total"],
            **metrics,
            **done.metrics,
        }
        return {name: self._placement.relayout(v, ()) for name, v in outputs.items()}

    def _loss(
        self, weights: Flat, batch: Flat, ctx: MeshContext, *, step: Any, offset: Any
    ) -> LossSums:
        """The sums over a part of a batch; the context is that of this step and part."""
        return task_results.loss(self._task, self._theta(weights, ctx), batch, ctx)

    def _gradients(
        self, weights: Flat, batch: Flat, offset: Any, step: Any, total_weight: Any, whole: int
    ) -> tuple[Flat, dict[str, Any]]:
        size = next(iter(batch.values())).shape[0]
        ctx = self._context("train", step, offset, size)
        ctx.num_examples = whole
        trained = {path: weights[path] for path in self._trained}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            output = self._loss(weights, batch, ctx, step=step, offset=offset)
            total = output.total(total_weight, ctx.collected.total("loss"))
        gradients = tape.gradient(
            total, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        gradients = {
            path: self._placement.relayout(tf.convert_to_tensor(g), self._gradient_axes(path))
            for path, g in gradients.items()
        }
        weight = task_results.loss_weight(self._task, batch)
        metrics = ctx.collected.reported(output.metrics)
        share = tf.constant(size / whole)
        metrics |= {f"aux/{n}": (v, share) for n, (v, _) in ctx.collected.sums["loss"].items()}
        return gradients, {
            "loss": (output.loss_sum, tf.cast(weight, output.loss_sum.dtype)),
            "total": total,
            "metric": metrics,
            "statistic": ctx.collected.sums["statistic"],
        }

    def _gradient_axes(self, path: str) -> Layout:
        """How a gradient lies when it is whole: as finely as what is updated by it."""
        return self._layout.of_slot(self._weight_specs[path])

    # --- evaluation ---

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `Program`."""
        sums = self._eval(self._place(batch))
        return {name: tuple(map(self._placement.local, pair)) for name, pair in sums.items()}

    def _eval_graph(self, batch: Any) -> dict[str, Any]:
        size = next(iter(batch.values())).shape[0]
        ctx = self._context("eval", 0, 0, size)
        weights = self._learner.evaluation_weights(self._flat(WEIGHTS), self._flat(LEARNER))
        with refused(self._task):
            output = self._loss(weights, batch, ctx, step=0, offset=0)
        weight = task_results.loss_weight(self._task, batch)
        sums = {"loss": (output.loss_sum, weight), **ctx.collected.reported(output.metrics)}
        return {
            name: tuple(self._placement.relayout(tf.convert_to_tensor(v), ()) for v in pair)
            for name, pair in sums.items()
        }

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `Program`; on one device, or over the mesh."""
        return self._calls.call(function, inputs)

    def _begin_call(self, examples: int) -> tuple[Any, MeshContext]:
        ctx = self._context("decode", 0, 0, examples)
        weights = self._learner.evaluation_weights(self._flat(WEIGHTS), self._flat(LEARNER))
        return self._theta(weights, ctx), ctx

    def _evaluation_weights_graph(self) -> Flat:
        """The weights of evaluation, laid out as they are stored, in the type of activations."""
        weights = self._learner.evaluation_weights(self._flat(WEIGHTS), self._flat(LEARNER))
        return {path: self._evaluated(path, w) for path, w in weights.items()}

    def _evaluated(self, path: str, weight: tf.Tensor) -> tf.Tensor:
        weight = step_context.cast(self._weight_specs[path], weight, self._activation_dtype)
        return self._placement.relayout(weight, self._stored[WEIGHTS + path])
