"""The program of the data-parallel execution; `data_parallel.py` describes how a step is split."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tekso.framework.context import Mode, StepContext
from tekso.framework.execution.base import Batch, ExecutionProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.process_sums import ProcessSums
from tekso.framework.execution.shards import Owners, Shard, Slices, part_of, pieces, whole
from tekso.framework.execution.state import Stored, checked_state
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.state import State
from tekso.framework.step import Flat, Step, Sums, added, part_sums, unscaled, with_gradients
from tekso.framework.weight_spec import WeightSpec

Gradients = list[Flat]
"""Gradients of several parts of a batch, not summed yet."""

Compute = Callable[[Mapping[str, tf.Tensor], Any, int], tuple[Gradients, Sums]]
"""`compute(part, index of the first example, index of the part)`."""


def _sum_over_replicas(ctx: StepContext, x: tf.Tensor) -> tf.Tensor:
    return cast(ReplicaContext, ctx).all_reduce(x)


_FORMS = {"sum_over_replicas": _sum_over_replicas}


class ReplicaContext(StepContext):
    """The step context of a part of the batch on one of several devices."""

    forms = _FORMS

    def __init__(self, *, all_reduce: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.all_reduce = all_reduce


class DataParallelProgram(ExecutionProgram):
    """See `ExecutionProgram`; the state is one variable per key, mirrored over the devices."""

    def __init__(
        self,
        step: Step,
        strategy: tf.distribute.Strategy,
        processes: ProcessSums | None = None,
        *,
        towers: int,
        xla: str,
    ) -> None:
        self._step, self._strategy, self._towers, self._xla = step, strategy, towers, xla
        self._processes = processes or ProcessSums()
        self.part = self._processes.process, self._processes.size
        self.num_replicas = strategy.num_replicas_in_sync * self._processes.size
        self._accumulation = step.learner.params.accumulation_steps
        self._variables: State[tf.Variable] = State({}, {})
        self._fusions: dict[Any, XlaFusion] = {}
        self._compiled_towers: dict[Any, Callable[..., Any]] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._train = tf.function(self._train_graph, autograph=False)
        self._eval = tf.function(self._eval_graph, autograph=False)
        self._compiled_update = tf.function(self._new_state, jit_compile=True, autograph=False)

    # --- state ---

    def specs(self) -> dict[str, WeightSpec]:
        """See `ExecutionProgram`."""
        return self._step.specs.keyed()

    def initialize(self) -> None:
        """See `ExecutionProgram`."""
        specs = self.specs()
        self._assign(lambda key: specs[key].initial_value(self._step.seed))

    def restore(self, read: Callable[[str], Stored], keys: Set[str]) -> None:
        """See `ExecutionProgram`."""
        values = checked_state(self.specs(), read, keys)
        self._assign(lambda key: values[key][whole(values[key].shape)])

    def _assign(self, value: Callable[[str], np.ndarray]) -> None:
        variables = self._variables.keyed()
        with self._strategy.scope():
            for key, spec in self.specs().items():
                if key in variables:
                    variables[key].assign(value(key))
                else:
                    variables[key] = tf.Variable(
                        value(key), dtype=spec.dtype, trainable=False, name=key.replace("/", ".")
                    )
        self._variables = State.of_keys(variables)

    def state(self) -> dict[str, np.ndarray]:
        """See `ExecutionProgram`."""
        return self._variables.map(lambda variable: variable.numpy()).keyed()

    def shards(self) -> Iterator[Shard]:
        """See `ExecutionProgram`; the state, which all processes have, is divided among them."""
        owners, processes = Owners(self._processes.process), range(self._processes.size)
        for key, variable in self._variables.keyed().items():

            def read(where: Slices, variable: tf.Variable = variable) -> tf.Tensor:
                return part_of(variable.read_value(), where, whole(variable.shape))

            for shard in pieces(key, variable.shape, variable.dtype.name, read):
                if owners.is_own(shard, processes):
                    yield shard

    def _own_variables(self) -> list[Any]:
        """Returns the variables of every replica."""
        variables = self._variables.keyed().values()
        return [own for v in variables for own in getattr(v, "values", (v,))]

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `ExecutionProgram`."""
        return self._train(self._place(batch), tf.constant(step, tf.int64))

    def _place(self, batch: Batch, *, even: bool = True) -> Any:
        """Splits a batch over the replicas: into equal parts, or as equal as possible."""
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

    def _train_graph(self, batch: Any, step: tf.Tensor) -> Flat:
        weight = self._reduce(self._strategy.run(self._step.loss_weight, args=(batch,)))
        weight = self._processes.of_nest(weight)
        gradients, sums = self._strategy.run(self._replica_gradients, args=(batch, step, weight))
        # `update` runs on the devices of one variable; the others are passed as arguments.
        anchor = next(iter(self._variables.weights.values()))
        metrics = self._strategy.extended.update(
            anchor, self._replica_update, args=(self._variables, gradients, sums, step), group=False
        )
        # Ungrouped, each value is a tuple with one element per device.
        metrics = {name: values[0] for name, values in self._first(metrics).items()}
        return self._step.report(self._first(sums), weight, metrics)

    def _replica_gradients(
        self, batch: Any, step: tf.Tensor, total_weight: tf.Tensor
    ) -> tuple[Gradients, Sums]:
        """Computes the part of this replica; returns gradients and sums of the global batch."""
        weights = _values(self._variables.weights)
        scale = self._step.loss_scale(self._variables.slots)
        scale = None if scale is None else tf.convert_to_tensor(scale)
        size = _size(batch)
        num_examples = size * self.num_replicas

        def tower(part: Any, start: Any, number: int) -> tuple[Gradients, Sums]:
            offset = tf.convert_to_tensor(start, tf.int32)
            compute = self._tower((_replica_number(), number), num_examples)
            gradients, sums = compute(weights, part, offset, step, total_weight, scale)
            return [gradients], sums

        def towers(part: Any, start: Any, _: int) -> tuple[Gradients, Sums]:
            count = math.gcd(_size(part), self._towers)
            return _side_by_side(part, start, count, tower)

        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        replica += self._processes.process  # there is one replica if there are several processes
        count = math.gcd(size, self._accumulation)  # of a later batch of another size, maybe fewer
        found = _one_after_the_other(batch, replica * size, count, towers)
        if self.num_replicas == 1:
            return found
        gradients, sums = found
        gradients, sums = self._all_reduce((added(gradients), sums))
        return [gradients], sums

    def _all_reduce(self, nest: Any) -> Any:
        """Returns a nest of tensors, summed over the replicas of all processes."""
        if self._processes.size > 1:
            return self._processes.of_nest(nest)
        replica_context = tf.distribute.get_replica_context()
        return replica_context.all_reduce(tf.distribute.ReduceOp.SUM, nest)

    def _tower(self, key: tuple[int, int], num_examples: int) -> Callable[..., Any]:
        def compute(
            weights: Flat,
            part: Flat,
            offset: tf.Tensor,
            step: tf.Tensor,
            total_weight: tf.Tensor,
            scale: tf.Tensor | None,
        ) -> tuple[Flat, Sums]:
            ctx = self._context("train", key, step, offset, num_examples)

            def forward() -> tuple[Sequence[tf.Tensor], Sums]:
                end = self._step.loss(weights, part, ctx, own=self._own_variables())
                return [], part_sums(end, ctx, total_weight)

            trained = {path: weights[path] for path in self._step.trained}
            _, sums, gradients = with_gradients(forward, trained, seed_of_total=scale)
            return {path: unscaled(g, scale) for path, g in gradients.items()}, sums

        return self._compiled(("train", *key, num_examples), compute)

    def _compiled(self, key: tuple[Any, ...], compute: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compute` as one XLA program for all traces with this key, if `xla` is step."""
        if self._xla != "step":
            return compute
        return self._compiled_towers.setdefault(
            key, tf.function(compute, jit_compile=True, autograph=False)
        )

    def _fusion(self, key: Any) -> Any:
        """Returns what compiles the elementwise clusters of a tower or of an update."""
        is_used = self._xla == "clusters"
        return self._fusions.setdefault(key, XlaFusion()) if is_used else no_fusion

    def _context(
        self, mode: Mode, key: Any, step: Any, offset: Any, num_examples: int | None
    ) -> StepContext:
        kind: Callable[..., StepContext] = StepContext
        if self.num_replicas > 1:
            kind = functools.partial(ReplicaContext, all_reduce=self._all_reduce)
        return kind(
            mode=mode,
            seed=self._step.seed,
            step=step,
            example_offset=offset,
            num_examples=num_examples,
            fuse=self._fusion(key),
        )

    def _new_state(
        self,
        state: State[Any],
        gradients: Gradients,
        sums: Sums,
        step: tf.Tensor,
        fuse: Any = no_fusion,
    ) -> Any:
        return self._step.update(state, added(gradients), sums, step, fuse=fuse)

    def _update(self, device: str) -> Callable[..., Any]:
        """Returns the update on a device, compiled once for batches of all shapes."""
        if self._xla == "step":
            return self._compiled_update
        return functools.partial(self._new_state, fuse=self._fusion(("update", device)))

    def _replica_update(
        self, anchor: Any, variables: State[Any], gradients: Gradients, sums: Sums, step: tf.Tensor
    ) -> Flat:
        """Assigns the new weights and slots on a device; returns the learner's metrics."""
        update = self._update(anchor.device)
        new, metrics = update(variables.map(tf.convert_to_tensor), gradients, sums, step)
        for mapping, values in zip(variables, new, strict=True):
            for path, value in values.items():
                mapping[path].assign(value)
        return metrics

    def _first(self, per_replica: Any) -> Any:
        return tf.nest.map_structure(
            lambda x: self._strategy.experimental_local_results(x)[0], per_replica
        )

    def _reduce(self, per_replica: Any) -> tf.Tensor:
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    # --- evaluation ---

    def _evaluation_weights(self) -> Flat:
        return self._step.evaluation_weights(self._variables.map(tf.convert_to_tensor))

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `ExecutionProgram`."""
        placed = self._place(batch, even=False)
        size = len(next(iter(batch.values())))
        if self._processes.size == 1:
            found: dict[str, tuple[Any, Any]] = self._eval(placed, 0, size)
            return found
        # No collectives in the program: a rest of a batch has another shape in some processes only.
        sizes = self._processes.gathered(size)
        own = self._eval(placed, sum(sizes[: self._processes.process]), sum(sizes))
        sums = self._processes.of_numbers([float(x) for x in tf.nest.flatten(own)])
        packed: dict[str, tuple[Any, Any]] = tf.nest.pack_sequence_as(own, sums)
        return packed

    def _eval_graph(self, batch: Any, first: int, whole: int) -> dict[str, Any]:
        """Returns the sums of the examples of this process, from `first` on, of a batch."""
        sums = self._strategy.run(self._replica_eval, args=(batch, first, whole))
        return tf.nest.map_structure(self._reduce, sums)

    def _replica_eval(self, batch: Any, first: int, whole: int) -> dict[str, Any]:
        weights, size = self._evaluation_weights(), _size(batch)

        def tower(part: Any, start: Any, number: int) -> tuple[Gradients, Any]:
            compute = self._eval_tower((_replica_number(), number), whole)
            return [], compute(weights, part, tf.convert_to_tensor(start, tf.int32))

        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        start = first + _part_start(whole, self._strategy.num_replicas_in_sync, replica)
        towers = self._towers if size % self._towers == 0 else 1
        return _side_by_side(batch, start, towers, tower)[1]

    def _eval_tower(self, key: tuple[int, int], whole: int) -> Callable[..., Any]:
        def compute(weights: Flat, part: Flat, offset: tf.Tensor) -> Any:
            ctx = self._context("eval", ("eval", *key), 0, offset, whole)
            end = self._step.loss(weights, part, ctx, own=self._own_variables())
            return self._step.evaluation_sums(end, part, ctx)

        return self._compiled(("eval", *key, whole), compute)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`."""
        if function not in self._calls:

            def run(*inputs: Any) -> Any:
                ctx = StepContext(mode="decode", seed=self._step.seed)
                weights = self._step.cast(self._evaluation_weights())
                return function(self._step.task.theta(weights), *inputs, ctx)

            self._calls[function] = tf.function(run, autograph=False)
        return self._calls[function](*inputs)


def _values(variables: Mapping[str, tf.Variable]) -> Flat:
    return {path: tf.convert_to_tensor(variable) for path, variable in variables.items()}


def _size(batch: Mapping[str, tf.Tensor]) -> int:
    """Returns the number of examples."""
    return next(iter(batch.values())).shape[0]


def _side_by_side(
    batch: Mapping[str, tf.Tensor], start: Any, count: int, compute: Any
) -> tuple[Gradients, Any]:
    """Computes equal parts of a batch concurrently; returns gradients per part and summed sums."""
    gradients, sums = [], []
    size = _size(batch) // count
    for number in range(count):
        part = {name: x[number * size : (number + 1) * size] for name, x in batch.items()}
        own_gradients, own_sums = compute(part, start + number * size, number)
        gradients += own_gradients
        sums.append(own_sums)
    return gradients, added(sums)


def _one_after_the_other(
    batch: Mapping[str, tf.Tensor], start: Any, count: int, compute: Compute
) -> tuple[Gradients, Sums]:
    """Computes equal parts of a batch in a loop that accumulates their gradients and sums."""
    if count == 1:
        return compute(batch, start, 0)
    size = _size(batch) // count

    def part(index: Any) -> tuple[Flat, Sums]:
        examples = {
            name: tf.slice(x, [index * size] + [0] * (x.shape.rank - 1), [size, *x.shape[1:]])
            for name, x in batch.items()
        }
        gradients, sums = compute(examples, start + index * size, 0)
        return added(gradients), sums

    gradients, sums = tf.while_loop(
        lambda i, *_: i < count,
        lambda i, total: (i + 1, tf.nest.map_structure(tf.add, total, part(i))),
        (tf.constant(1), part(0)),
        maximum_iterations=count,
    )[1]
    return [gradients], sums


def _replica_number() -> int:
    """Returns the index of the replica being traced; 0 if one trace serves all replicas (TPU)."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica) or 0)


def _part_start(size: int, parts: int, part: Any) -> Any:
    """Returns the index of the first example of a part; the first parts take the remainder."""
    shorter, rest = divmod(size, parts)
    if isinstance(part, int):
        return part * shorter + min(part, rest)
    return part * shorter + tf.minimum(part, rest)
