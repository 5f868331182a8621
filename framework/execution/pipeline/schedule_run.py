"""Runs a schedule over a part of a batch, and stores the tensors that are alive between actions.

A value is sent directly from the stage that computes it to the stages that read it. Gradients are
sent directly in the opposite direction. The last reader of a value frees it.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.pipeline.actions import BACKWARD, FORWARD, Action, Event
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.pipeline.stage_functions import StageFunctions, Tensors
from tekso.framework.execution.pipeline.stages import BATCH, Stage, Value
from tekso.framework.execution.pipeline.workers import Worker, Workers
from tekso.framework.nests import tensors
from tekso.framework.step import Flat

Key = tuple[int, int]
"""Replica and stage."""


@dataclasses.dataclass(frozen=True)
class ScheduleResult:
    """What a run of a schedule returns.

    Attributes:
      sums: for every stage, the flat sums of its micro-batches, in the order of summation.
      events: {worker: its actions with start and end}.
    """

    sums: list[list[list[tf.Tensor]]]
    events: dict[Worker, list[Event]]


class ScheduleRun:
    """One run of a schedule over a part of a batch.

    Args:
      plan: stages, schedule, micro-batches.
      functions: functions of every stage of every replica.
      backends: backends of every stage of every replica.
      weights: weights that every stage of every replica reads.
      batch: the part of the global batch.
      start: position of its first example in the global batch.
      step: number of the training step.
      total_weight: loss weight of the global batch.
      loss_scale: factor of the loss in the backward pass; None: 1.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        functions: Mapping[Key, StageFunctions],
        backends: Sequence[Sequence[StageBackend]],
        weights: Mapping[Key, Flat],
        batch: Mapping[str, np.ndarray],
        start: int,
        *,
        step: int,
        total_weight: tf.Tensor,
        loss_scale: tf.Tensor | None,
    ) -> None:
        self._plan, self._functions, self._backends = plan, functions, backends
        self._batch, self._start = batch, start
        # Placed once for all micro-batches: to place a scalar takes as long as a small op.
        self._known: dict[Key, Tensors] = {
            key: {
                **functions[key].weights(flat),
                **functions[key].scalars(step, total_weight, loss_scale),
            }
            for key, flat in weights.items()
        }
        self._offsets: dict[Any, Tensors] = {}
        self._lock = threading.Lock()
        self._readers = collections.Counter(
            value for stage in plan.stage_plan.stages for value in stage.inputs
        )
        self._values: dict[Any, list[Any]] = {}
        self._readers_left: dict[Any, int] = {}
        self._gradients: dict[Any, list[list[Any]]] = collections.defaultdict(list)
        self._saved: dict[Any, Tensors] = {}  # between the passes of a micro-batch
        self._sums: list[dict[tuple[int, int], list[tf.Tensor]]] = [
            {} for _ in plan.stage_plan.stages
        ]

    def run(self, workers: Workers, name_of: Callable[[Worker, Action], str]) -> ScheduleResult:
        """Runs all actions.

        Args:
          workers: threads.
          name_of: returns a name of an action for an error.

        Raises:
          StageError: an action failed.
        """
        events = workers.run(
            self._plan.orders, self.perform, num_stages=len(self._sums), name_of=name_of
        )
        return ScheduleResult([[s[key] for key in sorted(s)] for s in self._sums], events)

    def perform(self, worker: Worker, action: Action) -> None:
        """Runs one action of a worker."""
        replica, stage = worker[0], self._plan.stage_plan.stages[action.stage]
        if action.kind == FORWARD:
            self._forward(replica, stage, action.micro_batch)
        elif action.kind == BACKWARD:
            self._backward(replica, stage, action.micro_batch)
        else:
            self._weight_gradient(replica, stage, action.micro_batch)

    def _first(self, replica: int, m: int) -> int:
        """Returns the position in the part of the first example of a replica's micro-batch."""
        size = self._plan.micro_batch_size
        return (m * self._plan.num_replicas + replica) * size

    def _of_micro_batch(self, replica: int, stage: Stage, m: int) -> Tensors:
        """Returns the weights and scalars of a stage, by name."""
        key = replica, stage.index, m
        if key not in self._offsets:
            first = self._start + self._first(replica, m)
            self._offsets[key] = self._functions[key[:2]].offset(first)
        return {**self._known[key[:2]], **self._offsets[key]}

    def _forward(self, replica: int, stage: Stage, m: int) -> None:
        functions, backend = (
            self._functions[replica, stage.index],
            self._backends[replica][stage.index],
        )
        given = [t for value in stage.inputs for t in self._take(backend, value, replica, m)]
        inputs = functions.inputs(given)
        key, saves = (replica, stage.index, m), self._plan.saves(m)
        if functions.is_deferred(saves=saves):
            self._saved[key] = inputs
            return
        known = {**self._of_micro_batch(replica, stage, m), **inputs}
        outputs, sums, saved = functions.forward(known, saves=saves)
        self._saved[key] = saved if saves else inputs
        made = iter(outputs)
        for name in stage.outputs:
            value = Value(name, stage.index)
            count = len(tensors(self._plan.stage_plan.values[value]))
            self._values[value, replica, m] = [backend.send(next(made)) for _ in range(count)]
            self._readers_left[value, replica, m] = self._readers[value]
        self._add_sums(replica, stage, m, sums)

    def _add_sums(self, replica: int, stage: Stage, m: int, sums: Sequence[tf.Tensor]) -> None:
        own = [self._backends[replica][stage.index].local(x) for x in sums]
        with self._lock:
            self._sums[stage.index][m, replica] = own

    def _take(self, backend: StageBackend, value: Value, replica: int, m: int) -> list[tf.Tensor]:
        """Returns the flat tensors of a value on a reader's backend; the last reader frees them."""
        if value.producer == BATCH:
            first = self._first(replica, m)
            array = self._batch[value.name][first : first + self._plan.micro_batch_size]
            return [backend.put(array)]
        key = value, replica, m
        with self._lock:
            self._readers_left[key] -= 1
            given = self._values[key] if self._readers_left[key] else self._values.pop(key)
        return [backend.take(sent) for sent in given]

    def _backward(self, replica: int, stage: Stage, m: int) -> None:
        functions, backend = (
            self._functions[replica, stage.index],
            self._backends[replica][stage.index],
        )
        key, saves = (replica, stage.index, m), self._plan.saves(m)
        saved, seeds = self._saved.pop(key), self._seeds(backend, replica, stage, m)
        known = {
            **self._of_micro_batch(replica, stage, m),
            **saved,
            **functions.seeds(seeds),
        }
        gradients, sums, left = functions.backward(known, saves=saves)
        if self._plan.splits_backward:
            self._saved[key] = left
        if functions.is_deferred(saves=saves):
            self._add_sums(replica, stage, m, sums)
        given = iter(gradients)
        for value in stage.inputs:  # send gradients to the stages that computed the values
            learned = self._plan.stage_plan.learned(value)
            if any(learned):
                own = [backend.send(next(given)) for is_learned in learned if is_learned]
                self._gradients[value, replica, m].append(own)

    def _seeds(self, backend: StageBackend, replica: int, stage: Stage, m: int) -> list[tf.Tensor]:
        """Returns the gradients of the outputs of a stage, summed over all readers."""
        found = []
        for name in stage.outputs:
            of_readers = self._gradients.pop((Value(name, stage.index), replica, m), [])
            for column in zip(*of_readers, strict=True):
                placed = [backend.take(sent) for sent in column]
                found.append(placed[0] if len(placed) == 1 else backend.call(tf.add_n, placed))
        return found

    def _weight_gradient(self, replica: int, stage: Stage, m: int) -> None:
        functions = self._functions[replica, stage.index]
        saved = self._saved.pop((replica, stage.index, m))
        functions.weight_gradient({**self._of_micro_batch(replica, stage, m), **saved})
