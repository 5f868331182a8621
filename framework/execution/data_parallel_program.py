"""The program of the data-parallel execution; `data_parallel.py` says how a step is divided."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import Mode, StepContext
from tekso.framework.execution.base import (
    LEARNER,
    WEIGHTS,
    Batch,
    ExecutionError,
    Program,
    checked_state,
    reduce_collected,
)
from tekso.framework.foreign_variables import refused
from tekso.framework.learning_step import select
from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion
from tekso.framework.weight_spec import WeightSpec

Flat = dict[str, tf.Tensor]


class ReplicaContext(StepContext):
    """The context of a part of the batch on one of several devices."""

    def sum_over_replicas(self, x: tf.Tensor) -> tf.Tensor:
        """See `StepContext`."""
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)


class DataParallelProgram(Program):
    """See `Program`; the state is a variable a key, mirrored over the devices."""

    def __init__(
        self,
        task: Any,
        learner: Any,
        strategy: tf.distribute.Strategy,
        *,
        towers: int,
        xla: str,
        seed: int,
    ) -> None:
        self._task, self._learner, self._strategy = task, learner, strategy
        self._towers, self._xla, self._seed = towers, xla, seed
        self._weight_specs = task.specs()
        self._trained = learner.trainable(self._weight_specs)
        self._slot_specs = learner.slots(self._weight_specs)
        self._variables: dict[str, tf.Variable] = {}
        self._fusions: dict[Any, Any] = {}
        self._update_fusions: dict[str, XlaFusion] = {}
        self._compiled_towers: dict[Any, Callable[..., Any]] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._train = tf.function(self._train_graph, autograph=False)
        self._eval = tf.function(self._eval_graph, autograph=False)
        self._compiled_update = tf.function(self._new_values, jit_compile=True, autograph=False)

    # --- state ---

    def specs(self) -> dict[str, WeightSpec]:
        """See `Program`."""
        weights = {WEIGHTS + path: spec for path, spec in self._weight_specs.items()}
        return weights | {LEARNER + path: spec for path, spec in self._slot_specs.items()}

    def initialize(self) -> None:
        """See `Program`."""
        specs = self.specs()
        self._assign(lambda key: specs[key].initial_value(self._seed))

    def restore(self, read: Callable[[str], np.ndarray], keys: Set[str]) -> None:
        """See `Program`."""
        values = checked_state(self.specs(), read, keys)
        self._assign(lambda key: values.pop(key))

    def _assign(self, value: Callable[[str], np.ndarray]) -> None:
        with self._strategy.scope():
            for key, spec in self.specs().items():
                if key in self._variables:
                    self._variables[key].assign(value(key))
                else:
                    self._variables[key] = tf.Variable(
                        value(key), dtype=spec.dtype, trainable=False, name=key.replace("/", ".")
                    )

    def state(self) -> dict[str, np.ndarray]:
        """See `Program`."""
        return {key: variable.numpy() for key, variable in self._variables.items()}

    def _flat(self, prefix: str, variables: Mapping[str, Any]) -> Flat:
        return {
            key[len(prefix) :]: tf.convert_to_tensor(v)
            for key, v in variables.items()
            if key.startswith(prefix)
        }

    def _own_variables(self) -> list[Any]:
        """Those of every replica."""
        return [own for v in self._variables.values() for own in getattr(v, "values", (v,))]

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `Program`."""
        return self._train(self._place(batch), tf.constant(step, tf.int64))

    def _place(self, batch: Batch, *, even: bool = True) -> Any:
        """Gives every replica its part of a batch: equal parts, or as equal as they can be."""
        replicas = self._strategy.num_replicas_in_sync
        sizes = {name: len(array) for name, array in batch.items()}
        size = next(iter(sizes.values()))
        fits = size % replicas == 0 if even else size >= replicas
        if any(n != size for n in sizes.values()) or not fits:
            how = "split evenly over" if even else "have an example for each of"
            raise ExecutionError(
                f"a batch with leading dims {sizes} does not {how} {replicas} devices"
            )
        if replicas == 1:
            return {name: tf.convert_to_tensor(array) for name, array in batch.items()}

        def local(value_context: Any) -> Any:
            replica = value_context.replica_id_in_sync_group
            start, end = (_part_start(size, replicas, i) for i in (replica, replica + 1))
            return {name: tf.constant(a[start:end]) for name, a in batch.items()}

        return self._strategy.experimental_distribute_values_from_function(local)

    def _train_graph(self, batch: Any, step: tf.Tensor) -> dict[str, tf.Tensor]:
        weigh = functools.partial(task_results.loss_weight, self._task)
        total_weight = self._reduce(self._strategy.run(weigh, args=(batch,)))
        args = (batch, step, total_weight)
        gradients, sums = self._strategy.run(self._replica_gradients, args=args)
        # Any variable gives `update` its devices; the others come along as arguments.
        anchor = next(iter(self._variables.values()))
        learned = self._strategy.extended.update(
            anchor, self._replica_update, args=(self._variables, gradients, sums, step), group=False
        )
        # Ungrouped, each value is a tuple with one element a device.
        learned = {name: values[0] for name, values in self._first(learned).items()}
        sums = self._first(sums)
        means = {name: tf.math.divide_no_nan(*pair) for name, pair in sums["metric"].items()}
        return {
            "loss": tf.math.divide_no_nan(*sums["loss"]),
            "total_loss": sums["total"],
            **means,
            **learned,
        }

    def _replica_gradients(self, batch: Any, step: tf.Tensor, total_weight: tf.Tensor) -> Any:
        weights = self._flat(WEIGHTS, self._variables)
        parts = self._learner.params.accumulation_steps
        size = next(iter(batch.values())).shape[0]
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        start = replica * size

        def micro_batch(index: Any) -> Any:
            count = size // parts
            part = {
                name: x
                if parts == 1
                else tf.slice(x, [index * count] + [0] * (x.shape.rank - 1), [count, *x.shape[1:]])
                for name, x in batch.items()
            }
            return self._tower_gradients(weights, part, start + index * count, step, total_weight)

        gradients, sums = micro_batch(0)
        if parts > 1:
            first = (reduce_collected(gradients), sums)
            gradients, sums = tf.while_loop(
                lambda i, *_: i < parts,
                lambda i, total: (i + 1, _add_parts(total, micro_batch(i))),
                (tf.constant(1), first),
                maximum_iterations=parts,
            )[1]
            gradients = [gradients]
        if self._strategy.num_replicas_in_sync > 1:
            replica_context = tf.distribute.get_replica_context()
            everything = (reduce_collected(gradients), sums)
            gradients, sums = replica_context.all_reduce(tf.distribute.ReduceOp.SUM, everything)
            gradients = [gradients]
        return gradients, sums

    def _tower_gradients(
        self, weights: Flat, batch: Any, start: Any, step: tf.Tensor, total_weight: tf.Tensor
    ) -> tuple[list[Flat], dict[str, Any]]:
        """Returns the gradients of every tower, and the sums over all of them."""
        gradients, sums = [], []
        size = next(iter(batch.values())).shape[0]
        count = size // self._towers
        for tower in range(self._towers):
            part = {name: x[tower * count : (tower + 1) * count] for name, x in batch.items()}
            offset = tf.convert_to_tensor(start + tower * count, tf.int32)
            compute = self._tower(tower, size * self._num_parts)
            one_gradients, one_sums = compute(weights, part, offset, step, total_weight)
            gradients.append(one_gradients)
            sums.append(one_sums)
        return gradients, reduce_collected(sums)

    @property
    def _num_parts(self) -> int:
        """Parts of the global batch that are computed after each other or on other devices."""
        return self._learner.params.accumulation_steps * self._strategy.num_replicas_in_sync

    def _tower(self, tower: int, num_examples: int) -> Callable[..., Any]:
        key = (_replica_number(), tower)

        def compute(
            weights: Flat, batch: Any, offset: tf.Tensor, step: tf.Tensor, total_weight: tf.Tensor
        ) -> tuple[Flat, dict[str, Any]]:
            ctx = self._context("train", key, step, offset, num_examples)
            trained = {path: weights[path] for path in self._trained}
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trained)
                with refused(self._task, own=self._own_variables()):
                    output = task_results.loss(self._task, self._task.theta(weights), batch, ctx)
                total = output.total(total_weight, ctx.collected.total("loss"))
            gradients = tape.gradient(
                total, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            weight = task_results.loss_weight(self._task, batch)
            metrics = ctx.collected.reported(output.metrics)
            # Auxiliary losses are parts of a mean: their weights add up to 1 over the parts.
            share = tf.constant(next(iter(batch.values())).shape[0] / num_examples)
            metrics |= {f"aux/{n}": (v, share) for n, (v, _) in ctx.collected.sums["loss"].items()}
            return tf.nest.map_structure(tf.convert_to_tensor, gradients), {
                "loss": (output.loss_sum, tf.cast(weight, output.loss_sum.dtype)),
                "total": total,
                "metric": metrics,
                "statistic": ctx.collected.sums["statistic"],
            }

        if self._xla != "step":
            return compute
        whole = (*key, num_examples)
        if whole not in self._compiled_towers:
            self._compiled_towers[whole] = tf.function(compute, jit_compile=True, autograph=False)
        return self._compiled_towers[whole]

    def _context(
        self, mode: Mode, key: Any, step: Any, offset: Any, num_examples: int | None
    ) -> StepContext:
        fuse: Any = no_fusion
        if self._xla == "stretches":
            fuse = self._fusions.setdefault(key, XlaFusion())
        kind = ReplicaContext if self._strategy.num_replicas_in_sync > 1 else StepContext
        return kind(
            mode=mode,
            seed=self._seed,
            step=step,
            example_offset=offset,
            num_examples=num_examples,
            fuse=fuse,
        )

    def _new_values(
        self,
        weights: Flat,
        gradients: list[Flat],
        slots: Flat,
        step: tf.Tensor,
        loss: tf.Tensor,
        fuse: Fuse = no_fusion,
    ) -> Any:
        """The learner's update: new weights and slots, and metrics."""
        done = self._learner.update(
            self._weight_specs,
            weights,
            reduce_collected(gradients),
            slots,
            step,
            loss=loss,
            fuse=fuse,
        )
        return {path: done.weights[path] for path in self._trained}, done.slots, done.metrics

    def _update(self, device: str) -> Callable[..., Any]:
        """The update on a device, compiled once for batches of all shapes."""
        if self._xla == "step":
            return self._compiled_update
        if self._xla == "none":
            return self._new_values
        fuse = self._update_fusions.setdefault(device, XlaFusion())
        return functools.partial(self._new_values, fuse=fuse)

    def _replica_update(
        self, anchor: Any, variables: dict[str, Any], gradients: Any, sums: Any, step: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        weights = self._flat(WEIGHTS, variables)
        new_weights, new_slots, metrics = self._update(anchor.device)(
            weights, gradients, self._flat(LEARNER, variables), step, sums["total"]
        )
        new = {WEIGHTS + path: v for path, v in new_weights.items()}
        new |= {LEARNER + path: v for path, v in new_slots.items()}
        means = {n: tf.math.divide_no_nan(*pair) for n, pair in sums["statistic"].items()}
        statistics = self._learner.without_frozen(self._task.new_statistics(weights, means))
        taken = tf.equal(metrics["nonfinite_consecutive"], 0)  # a skipped step leaves no trace
        new |= {WEIGHTS + p: select(taken, v, weights[p]) for p, v in statistics.items()}
        for key, value in new.items():
            variables[key].assign(value)
        return metrics

    def _first(self, per_replica: Any) -> Any:
        return tf.nest.map_structure(
            lambda x: self._strategy.experimental_local_results(x)[0], per_replica
        )

    def _reduce(self, per_replica: Any) -> tf.Tensor:
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    # --- evaluation ---

    def _evaluation_theta(self) -> Any:
        weights = self._flat(WEIGHTS, self._variables)
        slots = self._flat(LEARNER, self._variables)
        return self._task.theta(self._learner.evaluation_weights(weights, slots))

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `Program`."""
        return self._eval(self._place(batch, even=False))

    def _eval_graph(self, batch: Any) -> dict[str, Any]:
        parts = self._strategy.experimental_local_results(next(iter(batch.values())))
        whole = sum(part.shape[0] for part in parts)
        sums = self._strategy.run(self._replica_eval, args=(batch, whole))
        return tf.nest.map_structure(self._reduce, sums)

    def _replica_eval(self, batch: Any, whole: int) -> dict[str, Any]:
        theta = self._evaluation_theta()
        size = next(iter(batch.values())).shape[0]
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        start = _part_start(whole, self._strategy.num_replicas_in_sync, replica)
        towers = self._towers if size % self._towers == 0 else 1
        count = size // towers
        parts = []
        for tower in range(towers):
            part = {name: x[tower * count : (tower + 1) * count] for name, x in batch.items()}
            offset = start + tower * count
            key = ("eval", _replica_number(), tower)
            ctx = self._context("eval", key, 0, offset, whole)
            with refused(self._task, own=self._own_variables()):
                output = task_results.loss(self._task, theta, part, ctx)
            weight = task_results.loss_weight(self._task, part)
            loss = (output.loss_sum, tf.cast(weight, output.loss_sum.dtype))
            parts.append({"loss": loss, **ctx.collected.reported(output.metrics)})
        return reduce_collected(parts)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `Program`."""
        if function not in self._calls:

            def run(*inputs: Any) -> Any:
                ctx = StepContext(mode="decode", seed=self._seed)
                return function(self._evaluation_theta(), *inputs, ctx)

            self._calls[function] = tf.function(run, autograph=False)
        return self._calls[function](*inputs)


def _replica_number() -> int:
    """Which replica is traced; 0 where one trace is that of all (TPU)."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica) or 0)


def _part_start(size: int, parts: int, part: Any) -> Any:
    """First of `size` examples that is in a part; the first parts take what does not divide."""
    shorter, rest = divmod(size, parts)
    if isinstance(part, int):
        return part * shorter + min(part, rest)
    return part * shorter + tf.minimum(part, rest)


def _add_parts(total: Any, part: tuple[list[Flat], Any]) -> Any:
    return tf.nest.map_structure(tf.add, total, (reduce_collected(part[0]), part[1]))
