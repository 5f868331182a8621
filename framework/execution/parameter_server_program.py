"""The program of asynchronous and hybrid data parallelism; see `parameter_servers.py`.

    trainer            worker                       parameter server
    batch ───────────► gradients of a part ◄─────── weights of version v
      ◄─────────────── gradients, sums
      ────────────────────────────────────────────► update: version v' ─► v' + 1

The staleness of an update is v' - v: the number of updates between reading the weights and applying
the gradients. The trainer applies the updates one after the other, so each is atomic and is applied
once. A worker only computes a pure function: if it is lost, another one computes the part again.

At the end of a call of `train_steps`, all its updates are applied. So a checkpoint of step n holds
the updates of exactly the batches 0 to n - 1.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.batch_sums import Sums, added
from tekso.framework.execution.base import Batch, ExecutionProgram, num_examples_of, parts_of
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.execution.shards import Shard
from tekso.framework.execution.state import ReadKey
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.execution.worker_pool import BROKEN_CONNECTION, LostServerError, WorkerPool
from tekso.framework.state import State
from tekso.framework.step import Flat, Step

_FIRST_SERVER = "/job:ps/replica:0/task:0"


@dataclasses.dataclass
class _Flight:
    """A batch that is being computed.

    Attributes:
      index: number of the batch in its call.
      step: number of its step.
      version: updates that its weights contain.
      total_weight: loss weight of the batch.
      parts: (gradients, sums) of every part, in the future.
    """

    index: int
    step: tf.Tensor
    version: int
    total_weight: tf.Tensor
    parts: list[concurrent.futures.Future[Any]]


class ParameterServerProgram(ExecutionProgram):
    """See `ExecutionProgram`; the state is on the parameter servers.

    Args:
      step: the steps of a task and a learner.
      local: the program of one device. It evaluates and decodes with a copy of the state, and
        stores the copy in checkpoints.
      strategy: creates variables on the parameter servers.
      pool: computes functions on workers, and connects again to workers that were lost.
      num_groups: number of batches that are computed at the same time.
      workers_per_group: number of parts of a batch.
    """

    def __init__(
        self,
        step: Step,
        local: DataParallelProgram,
        strategy: tf.distribute.ParameterServerStrategy,
        pool: WorkerPool,
        *,
        num_groups: int,
        workers_per_group: int,
    ) -> None:
        super().__init__(step)
        self._local = local
        self._strategy, self._pool = strategy, pool
        self.concurrent_steps, self._parts = num_groups, workers_per_group
        self._variables: State[tf.Variable] = State({}, {})
        self._version = self._local_version = 0  # updates in this process
        self._read: tuple[Flat, tf.Tensor | None] = {}, None  # weights and loss scale, immutable
        self._staleness: list[int] = []
        self._part_functions: dict[int, Any] = {}  # tf.functions
        self._loss_weight = tf.function(step.loss_weight, autograph=False)
        self._update = tf.function(self._update_graph, autograph=False)
        self._values = tf.function(self._values_graph, autograph=False)

    # --- state ---

    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        """See `ExecutionProgram`."""
        local = self._local if keys is None else self._fetched()
        local.assign(value, keys)
        self._send_state()

    def state(self, keys: Set[str] | None = None) -> dict[str, np.ndarray]:
        """See `ExecutionProgram`."""
        return self._fetched().state(keys)

    def shards(self) -> Iterator[Shard]:
        """See `ExecutionProgram`."""
        return self._fetched().shards()

    def hold_updates(self, gate: UpdateGate) -> bool:
        """See `ExecutionProgram`; a step changes only the state on the servers."""
        del gate
        return True

    def _send_state(self) -> None:
        """Copies the state of the local program to the parameter servers."""
        variables = self._variables.keyed()
        specs = self.specs()
        with self._explaining(), self._strategy.scope():
            for key, value in self._local.state().items():
                if key in variables:
                    variables[key].assign(value)
                else:
                    variables[key] = tf.Variable(
                        value, dtype=specs[key].dtype, trainable=False, name=key.replace("/", ".")
                    )
        self._variables = State.of_keys(variables)
        self._local_version = self._version
        with self._explaining(), tf.device(_FIRST_SERVER):
            self._read = self._values()

    def _fetched(self) -> DataParallelProgram:
        """Returns the local program with the state of the parameter servers."""
        if self._local_version != self._version:
            with self._explaining():
                state = self._variables.map(lambda variable: variable.numpy()).keyed()
            self._local.assign(lambda key, where: state[key][where])
            self._local_version = self._version
        return self._local

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `ExecutionProgram`."""
        return self.train_steps([batch], step)[0]

    def train_steps(self, batches: Sequence[Batch], step: int) -> list[dict[str, Any]]:
        """See `ExecutionProgram`.

        Results are in the order of the batches, with the metrics "staleness" of the update, and
        "staleness_mean" and "staleness_max" of all updates of this process so far.

        Raises:
          LostServerError: a parameter server was lost.
        """
        results: list[dict[str, Any]] = [{} for _ in batches]
        flying: list[_Flight] = []
        with self._explaining():
            for index, batch in enumerate(batches):
                if len(flying) == self.concurrent_steps:
                    self._apply_next(flying, results)
                flying.append(self._launch(index, batch, step + index))
            while flying:
                self._apply_next(flying, results)
        return results

    def _launch(self, index: int, batch: Batch, step: int) -> _Flight:
        """Gives a batch to the workers, with the newest weights."""
        size = num_examples_of(batch)
        count = parts_of(size, self._parts)
        compute = self._part_functions.setdefault(
            size, tf.function(functools.partial(self._part_graph, size), autograph=False)
        )
        whole = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
        weight = self._loss_weight(whole)
        step_number = tf.constant(step, tf.int64)
        futures = []
        for start in range(0, size, size // count):
            part = {name: array[start : start + size // count] for name, array in whole.items()}
            args = (*self._read, part, tf.constant(start), step_number, weight)
            futures.append(self._pool.submit(compute.get_concrete_function(*args), *args))
        return _Flight(index, step_number, self._version, weight, futures)

    def _apply_next(self, flying: list[_Flight], results: list[dict[str, Any]]) -> None:
        """Applies the update of the batch that is computed next, and removes it from `flying`."""
        while not (landed := [f for f in flying if all(part.done() for part in f.parts)]):
            self._pool.wait([part for f in flying for part in f.parts if not part.done()])
        flight = landed[0]
        flying.remove(flight)
        found = [part.result() for part in flight.parts]
        self._staleness.append(self._version - flight.version)
        with tf.device(_FIRST_SERVER):
            metrics, self._read = self._update(found, flight.step, flight.total_weight)
        self._version += 1
        figures = {name: value.numpy() for name, value in metrics.items()}
        stale = self._staleness
        figures |= {
            "staleness": np.float32(stale[-1]),
            "staleness_mean": np.float32(sum(stale) / len(stale)),
            "staleness_max": np.float32(max(stale)),
        }
        results[flight.index] = {name: tf.constant(value) for name, value in figures.items()}

    def _part_graph(
        self,
        num_examples: int,
        weights: Flat,
        scale: tf.Tensor | None,
        part: Any,
        start: tf.Tensor,
        step: tf.Tensor,
        total_weight: tf.Tensor,
    ) -> tuple[Flat, Sums]:
        """Computes a part of a batch, on a worker."""
        gradients, sums = self._local.part_gradients(
            weights,
            scale,
            part,
            start=start,
            num_examples=num_examples,
            step=step,
            total_weight=total_weight,
        )
        return added(gradients), sums

    def _update_graph(self, found: Any, step: tf.Tensor, total_weight: tf.Tensor) -> Any:
        """Updates the state, on the first parameter server."""
        gradients, sums = [own for own, _ in found], added([own for _, own in found])
        old = self._variables.map(tf.convert_to_tensor)
        new, metrics = self._local.updated(old, gradients, sums, step)
        for mapping, values in zip(self._variables, new, strict=True):
            for path, value in values.items():
                mapping[path].assign(value, read_value=False)
        return self._step.report(sums, total_weight, metrics), self._values_graph()

    def _values_graph(self) -> tuple[Flat, tf.Tensor | None]:
        weights = {path: tf.identity(v) for path, v in self._variables.weights.items()}
        return weights, self._step.loss_scale(self._variables.slots)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turns the error of an op on a lost parameter server into one that says what to do."""
        try:
            yield
        except tf.errors.OpError as error:
            if (lost := self._pool.lost_server()) is not None:
                raise lost from error
            if isinstance(error, BROKEN_CONNECTION):
                raise LostServerError(" or ".join(self._pool.servers)) from error
            raise

    def summary(self) -> list[str]:
        """See `ExecutionProgram`."""
        stale = self._staleness
        if not stale:
            return []
        mean = sum(stale) / len(stale)
        return [f"staleness of {len(stale)} updates: mean {mean:.2f}, maximum {max(stale)}"]

    # --- evaluation, with a copy of the weights in this process ---

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `ExecutionProgram`."""
        return self._fetched().eval_step(batch)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`."""
        return self._fetched().call(function, *inputs)
