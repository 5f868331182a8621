"""The program of the data-parallel execution; `data_parallel.py` describes how a step is split.

State, replicas and processes; `device_program.py` has what one of them computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import batch_part
from tekso.framework.batch_part import BatchPart, RowsOf
from tekso.framework.batch_sums import Sums, added
from tekso.framework.coupling import gathering, too_few
from tekso.framework.execution.base import Batch, parts_of, traced
from tekso.framework.execution.batch_parts import (
    Gradients,
    part_start,
    side_by_side,
    size_of,
)
from tekso.framework.execution.device_program import DeviceProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.process_sums import ProcessSums
from tekso.framework.execution.replica_context import replica_number, summed
from tekso.framework.execution.shards import Owners, Shard, chunks, cut_out, whole
from tekso.framework.execution.state import ReadKey, chosen
from tekso.framework.execution.workarounds.call_counts import counted_alone
from tekso.framework.state import State
from tekso.framework.step import Flat, Step
from tekso.framework.while_loops import while_loop


class DataParallelProgram(DeviceProgram):
    """See `ExecutionProgram`; the state is one variable per key, mirrored over the devices."""

    def __init__(
        self,
        step: Step,
        strategy: tf.distribute.Strategy,
        processes: ProcessSums | None = None,
        *,
        towers: int,
        xla: str,
        accumulation: int | None = None,
    ) -> None:
        self._strategy, self._processes = strategy, processes or ProcessSums()
        super().__init__(
            step,
            num_replicas=strategy.num_replicas_in_sync * self._processes.size,
            towers=towers,
            xla=xla,
            accumulation=accumulation,
        )
        self._variables: State[tf.Variable] = State({}, {})
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._train = counted_alone(tf.function(self._train_graph, autograph=False))
        self._train_loop = counted_alone(tf.function(self._train_loop_graph, autograph=False))
        self._eval = counted_alone(tf.function(self._eval_graph, autograph=False))

    # --- state ---

    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        """See `ExecutionProgram`."""
        variables = self._variables.keyed()
        with self._strategy.scope():
            for key, spec in chosen(self.specs(), keys).items():
                array = value(key, whole(spec.shape))
                if key in variables:
                    variables[key].assign(array)
                else:
                    # Every replica assigns the same values to its own copy, and reads that.
                    variables[key] = tf.Variable(
                        array,
                        dtype=spec.dtype,
                        trainable=False,
                        name=key.replace("/", "."),
                        synchronization=tf.VariableSynchronization.ON_READ,
                        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                    )
        self._variables = State.of_keys(variables)

    def state(self, keys: Set[str] | None = None) -> dict[str, np.ndarray]:
        """See `ExecutionProgram`."""
        variables = chosen(self._variables.keyed(), keys)
        return {key: variable.numpy() for key, variable in variables.items()}

    def shards(self) -> Iterator[Shard]:
        """See `ExecutionProgram`; the state, which all processes have, is divided among them."""
        owners, processes = Owners(self._processes.process), range(self._processes.size)
        for key, variable in self._variables.keyed().items():
            # The value shares the memory of the variable.
            read = functools.partial(cut_out, variable.read_value(), of=whole(variable.shape))
            for shard in chunks(key, variable.shape, variable.dtype.name, read):
                if owners.is_own(shard, processes):
                    yield shard

    def _own_variables(self) -> list[Any]:
        """Returns the variables of every replica."""
        variables = self._variables.keyed().values()
        return [own for v in variables for own in getattr(v, "values", (v,))]

    # --- training ---

    def own_rows(self, *, training: bool) -> RowsOf | None:
        """See `ExecutionProgram`: equal parts; those of an evaluation may differ by an example."""
        process, count = self._processes.process, self._processes.size
        if count == 1:
            return None
        if not training and not gathering(self._step.task):
            return lambda size: (batch_part.part_or_first(size, process, count),)
        return lambda size: (batch_part.equal_part(size, process, count, even=training),)

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `ExecutionProgram`."""
        batch = self.own_part(batch, training=True)
        return dict(self._train(self._place(batch), tf.constant(step, tf.int64)))

    def _place(self, batch: Batch, *, even: bool = True, dim: int = 0) -> Any:
        """Splits the dim `dim` of a batch: into equal parts if `even`, or as equal as possible."""
        replicas = self._strategy.num_replicas_in_sync
        sizes = {name: array.shape[dim] for name, array in batch.items()}
        size = next(iter(sizes.values()))
        if any(n != size for n in sizes.values()) or (even and size % replicas):
            raise ExecutionError(
                f"a batch with leading dims {sizes} does not split evenly over {replicas} devices"
            )
        if size < replicas and (names := gathering(self._step.task)):
            raise too_few(size, names[0], "compares", replicas)
        if replicas == 1:
            return {name: tf.convert_to_tensor(array) for name, array in batch.items()}

        def local(value_context: Any) -> Any:
            replica = value_context.replica_id_in_sync_group
            start, end = batch_part.part_or_first(size, replica, replicas)
            where = (slice(None),) * dim + (slice(start, end),)
            return {name: tf.constant(a[where]) for name, a in batch.items()}

        return self._strategy.experimental_distribute_values_from_function(local)

    def train_steps(self, batches: Sequence[Batch], step: int) -> list[dict[str, Any]]:
        """See `ExecutionProgram`; several steps are a loop in one call of a compiled function."""
        if len(batches) == 1:
            return [self.train_step(batches[0], step)]
        batches = [self.own_part(batch, training=True) for batch in batches]
        stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        found: list[dict[str, Any]] = self._train_loop(
            self._place(batches[0]), self._place(stacked, dim=1), tf.constant(step, tf.int64)
        )
        return found

    def _train_loop_graph(self, first: Any, stacked: Any, step: tf.Tensor) -> list[Flat]:
        """Trains on every batch of a stack.

        Args:
          first: the first batch, of which only the shapes are used.
          stacked: all batches, each array with a leading dim of steps.
          step: number of the first step.
        """
        count = next(iter(self._first(stacked).values())).shape[0]
        outputs = self._train.get_concrete_function(first, step).structured_outputs
        names = list(outputs)
        arrays = tuple(tf.TensorArray(outputs[n].dtype, count, element_shape=[]) for n in names)

        def one(i: tf.Tensor, arrays: Any) -> Any:
            at = {"args": (stacked, i)}
            batch = self._strategy.run(lambda x, i: {name: a[i] for name, a in x.items()}, **at)
            metrics = self._train(batch, step + tf.cast(i, step.dtype))
            new = (a.write(i, metrics[name]) for a, name in zip(arrays, names, strict=True))
            return i + 1, tuple(new)

        _, arrays = while_loop(
            lambda i, _: i < count, one, (tf.constant(0), arrays), parallel_iterations=1
        )
        columns = [tf.unstack(array.stack(), count) for array in arrays]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _train_graph(self, batch: Flat, step: tf.Tensor) -> Flat:
        metrics: Flat = self._first(self._strategy.run(self._replica_step, args=(batch, step)))
        return metrics

    def _replica_step(self, batch: Flat, step: tf.Tensor) -> Flat:
        """Computes and applies a step in a replica; returns the metrics of the global batch."""
        weight = self._all_reduce(self._step.loss_weight(batch))
        gradients, sums = self._replica_gradients(batch, step, weight)
        old = self._variables.map(tf.convert_to_tensor)
        new, metrics = self.updated(old, gradients, sums, step, replica=replica_number())
        for mapping, values in zip(self._variables, new, strict=True):
            for path, value in values.items():
                mapping[path].assign(value)
        return self._step.report(sums, weight, metrics)

    def _replica_gradients(
        self, batch: Flat, step: tf.Tensor, total_weight: tf.Tensor
    ) -> tuple[Gradients, Sums]:
        """Computes the part of this replica; returns gradients and sums of the global batch."""
        size, number = size_of(batch), replica_number()
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        replica += self._processes.process  # there is one replica if there are several processes
        weights = self._variables.weights
        found = self.part_gradients(
            {path: tf.convert_to_tensor(variable) for path, variable in weights.items()},
            self._step.loss_scale(self._variables.slots),
            batch,
            start=replica * size,
            num_examples=size * self.num_replicas,
            step=step,
            total_weight=total_weight,
            replica=number,
        )
        if self.num_replicas == 1:
            return found
        gradients, sums = found
        gradients, sums = self._all_reduce((added(gradients), sums))
        return [gradients], sums

    def _all_reduce(self, nest: Any) -> Any:
        """Returns a nest of tensors, summed over the replicas of all processes."""
        if self.num_replicas == 1:
            return nest
        if self._processes.size > 1:
            return self._processes.of_nest(nest)
        return summed(nest)

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
        batch = self.own_part(batch, training=False)
        placed, size = self._place(batch, even=False), batch_part.num_examples(batch)
        first = batch.rows[0][0] if isinstance(batch, BatchPart) else 0
        own: dict[str, tuple[Any, Any]] = self._eval(placed, first, size)
        if self._processes.size == 1:
            return own
        # Not in the program, because a process may trace it when others do not. That of a loss over
        # all examples has sums in it: the size of the global batch makes all trace it at once.
        sums = self._processes.of_numbers([float(x) for x in tf.nest.flatten(own)])
        packed: dict[str, tuple[Any, Any]] = tf.nest.pack_sequence_as(own, sums)
        return packed

    def _eval_graph(self, batch: Flat, first: int, whole: int) -> dict[str, Any]:
        """Returns the sums of the examples of this process, from `first` on, of a batch."""
        sums = self._strategy.run(self._replica_eval, args=(batch, first, whole))
        return dict(tf.nest.map_structure(self._reduce, sums))

    def _replica_eval(self, batch: Flat, first: int, whole: int) -> dict[str, Any]:
        weights, size = self._evaluation_weights(), size_of(batch)

        def tower(part: Any, start: Any, number: int) -> tuple[Gradients, Any]:
            compute = self._eval_tower((replica_number(), number), whole)
            return [], compute(weights, part, tf.convert_to_tensor(start, tf.int32))

        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        start = first + part_start(whole, self._strategy.num_replicas_in_sync, replica)
        count = parts_of(size, self._towers)
        sums = dict(side_by_side(batch, start, count, tower, in_turns=self._couples)[1])
        if whole < self.num_replicas:  # this replica may have computed the first example instead
            # One of the two numbers is 0: a process of several has one device.
            own = replica + self._processes.process < whole
            sums = tf.nest.map_structure(lambda x: tf.where(own, x, tf.zeros_like(x)), sums)
        return sums

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`."""
        return self._called(function)(*inputs)

    def trace(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`; `call` uses the trace."""
        return traced(self._called(function), *inputs)

    def _called(self, function: Callable[..., Any]) -> Any:
        """Returns the tf.function that computes `function` with the evaluation weights."""
        if function not in self._calls:

            def run(*inputs: Any) -> Any:
                def decoded() -> Any:
                    return self._step.decoded(function, self._evaluation_weights(), inputs)

                # For a TPU, tf.distribute compiles only what runs in its replicas.
                on_tpu = isinstance(self._strategy, tf.distribute.TPUStrategy)
                return self._first(self._strategy.run(decoded)) if on_tpu else decoded()

            self._calls[function] = counted_alone(tf.function(run, autograph=False))
        return self._calls[function]
