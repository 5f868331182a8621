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

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.base import Batch, ExecutionProgram, num_examples_of, parts_of
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.shards import Shard
from tekso.framework.execution.state import ReadKey
from tekso.framework.exit_codes import ExitCode
from tekso.framework.state import State
from tekso.framework.step import Flat, Step, Sums, added

_FIRST_SERVER = "/job:ps/replica:0/task:0"


class LostServerError(ExecutionError):
    """A parameter server was lost, and with it the weights since the last checkpoint."""

    exit_code = ExitCode.PROCESS_LOST


@dataclasses.dataclass
class _Flight:
    """A batch that is being computed.

    Attributes:
      index: number of the batch in its call.
      step: number of its step.
      version: updates that its weights contain.
      total_weight: loss weight of the batch.
      found: (gradients, sums) of every part, or the error.
    """

    index: int
    step: tf.Tensor
    version: int
    total_weight: tf.Tensor
    found: Any = None


class ParameterServerProgram(ExecutionProgram):
    """See `ExecutionProgram`; the state is on the parameter servers.

    Args:
      step: the steps of a task and a learner.
      local: the program of one device. It evaluates and decodes with a copy of the state, and
        stores the copy in checkpoints.
      strategy: creates variables on the parameter servers.
      coordinator: runs functions on workers, and replaces workers that are lost.
      num_groups: number of batches that are computed at the same time.
      workers_per_group: number of parts of a batch.
      server: address of the first parameter server, for messages.
    """

    def __init__(
        self,
        step: Step,
        local: DataParallelProgram,
        strategy: tf.distribute.ParameterServerStrategy,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        *,
        num_groups: int,
        workers_per_group: int,
        server: str,
    ) -> None:
        super().__init__(step)
        self._local = local
        self._strategy, self._coordinator = strategy, coordinator
        self.concurrent_steps, self._parts, self._server = num_groups, workers_per_group, server
        self._variables: State[tf.Variable] = State({}, {})
        self._version = self._local_version = 0  # updates in this process
        self._read: tuple[Flat, tf.Tensor | None] = {}, None  # weights and loss scale, immutable
        self._staleness: list[int] = []
        self._part_functions: dict[int, Callable[..., Any]] = {}
        self._loss_weight = tf.function(step.loss_weight, autograph=False)
        self._update = tf.function(self._update_graph, autograph=False)
        self._values = tf.function(self._values_graph, autograph=False)
        self._landed: queue.SimpleQueue[_Flight] = queue.SimpleQueue()

    # --- state ---

    def assign(self, value: ReadKey) -> None:
        """See `ExecutionProgram`."""
        self._local.assign(value)
        self._send_state()

    def state(self) -> dict[str, np.ndarray]:
        """See `ExecutionProgram`."""
        return self._fetched().state()

    def shards(self) -> Iterator[Shard]:
        """See `ExecutionProgram`."""
        return self._fetched().shards()

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
        flying = 0
        with self._explaining():
            for index, batch in enumerate(batches):
                if flying == self.concurrent_steps:
                    self._apply_next(results)
                    flying -= 1
                self._launch(index, batch, step + index)
                flying += 1
            for _ in range(flying):
                self._apply_next(results)
        return results

    def _launch(self, index: int, batch: Batch, step: int) -> None:
        """Gives a batch to the workers, with the newest weights."""
        size = num_examples_of(batch)
        count = parts_of(size, self._parts)
        compute = self._part_functions.setdefault(
            size, tf.function(functools.partial(self._part_graph, size), autograph=False)
        )
        whole = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
        weight = self._loss_weight(whole)
        flight = _Flight(index, tf.constant(step, tf.int64), self._version, weight)
        values = []
        for start in range(0, size, size // count):
            part = {name: array[start : start + size // count] for name, array in whole.items()}
            args = (*self._read, part, tf.constant(start), flight.step, weight)
            values.append(self._coordinator.schedule(compute, args=args))

        def wait() -> None:
            try:
                flight.found = [value.get() for value in values]
            except Exception as error:  # raised again by the thread that trains
                flight.found = error
            self._landed.put(flight)

        # A daemon, because it may wait for a worker that hangs when the run ends.
        threading.Thread(target=wait, name=f"step {step}", daemon=True).start()

    def _apply_next(self, results: list[dict[str, Any]]) -> None:
        """Applies the update of the batch that is computed next."""
        flight = self._landed.get()
        if isinstance(flight.found, Exception):
            raise flight.found
        self._staleness.append(self._version - flight.version)
        with tf.device(_FIRST_SERVER):
            metrics, self._read = self._update(flight.found, flight.step, flight.total_weight)
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
        """Turns an error of the connection to a parameter server into one that says what to do."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise LostServerError(
                f"a parameter server was lost (the first one is {self._server}), and with it the "
                "weights since the last checkpoint: start it again with the same command, and "
                "repeat this command to resume"
            ) from error

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
