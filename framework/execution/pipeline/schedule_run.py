"""Runs a schedule over a part of a batch, and stores the tensors that are alive between actions.

A value is sent directly from the stage that computes it to the stages that read it. Gradients are
sent directly in the opposite direction. The last reader of a value frees it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.pipeline.actions import BACKWARD, FORWARD, Action
from tekso.framework.execution.pipeline.piece_traces import tensors
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.pipeline.stage_functions import StageFunctions, Tensors
from tekso.framework.execution.pipeline.stages import BATCH, Stage, Value
from tekso.framework.execution.step import Flat

Key = tuple[int, int]
"""Replica and stage."""

Sums = dict[int, dict[tuple[int, int, int], list[tf.Tensor]]]
"""Flat sums by stage, then by (first example of the part, micro-batch, replica).

The keys fix the order of summation."""


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
      sums: receives the sums of every micro-batch.
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
        sums: Sums,
    ) -> None:
        self._plan, self._functions, self._backends = plan, functions, backends
        self._weights = {key: functions[key].weights(flat) for key, flat in weights.items()}
        self._batch, self._start, self._sums = batch, start, sums
        self._step, self._total_weight, self._loss_scale = step, total_weight, loss_scale
        self._lock = threading.Lock()
        self._readers = collections.Counter(
            value for stage in plan.stage_plan.stages for value in stage.inputs
        )
        self._values: dict[Any, list[Any]] = {}
        self._left: dict[Any, int] = {}
        self._gradients: dict[Any, list[list[Any]]] = collections.defaultdict(list)
        self._held: dict[Any, Tensors] = {}

    def perform(self, worker: tuple[int, int], action: Action) -> None:
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

    def _known(self, replica: int, stage: Stage, m: int) -> Tensors:
        """Returns the weights and scalars of a stage, by name."""
        key = replica, stage.index
        offset = self._start + self._first(replica, m)
        scalars = self._functions[key].scalars(offset, self._step, self._total_weight)
        return {**self._weights[key], **scalars}

    def _forward(self, replica: int, stage: Stage, m: int) -> None:
        functions, backend = (
            self._functions[replica, stage.index],
            self._backends[replica][stage.index],
        )
        given = [t for value in stage.inputs for t in self._take(backend, value, replica, m)]
        inputs = functions.inputs(given)
        keep = self._plan.keeps(m)
        self._held[replica, stage.index, m] = inputs
        if functions.is_deferred(keep=keep):
            return
        known = {**self._known(replica, stage, m), **inputs}
        outputs, sums, kept = functions.forward(known, keep=keep)
        if keep:
            self._held[replica, stage.index, m] = kept
        made = iter(outputs)
        for name in stage.outputs:
            value = Value(name, stage.index)
            count = len(tensors(self._plan.stage_plan.values[value]))
            self._values[value, replica, m] = [backend.send(next(made)) for _ in range(count)]
            self._left[value, replica, m] = self._readers[value]
        self._add_sums(replica, stage, m, sums)

    def _add_sums(self, replica: int, stage: Stage, m: int, sums: Sequence[tf.Tensor]) -> None:
        own = [self._backends[replica][stage.index].local(x) for x in sums]
        with self._lock:
            self._sums[stage.index][self._start, m, replica] = own

    def _take(self, backend: StageBackend, value: Value, replica: int, m: int) -> list[tf.Tensor]:
        """Returns the flat tensors of a value on a reader's backend; the last reader frees them."""
        if value.producer == BATCH:
            first = self._first(replica, m)
            array = self._batch[value.name][first : first + self._plan.micro_batch_size]
            return [backend.put(array)]
        key = value, replica, m
        with self._lock:
            self._left[key] -= 1
            given = self._values[key] if self._left[key] else self._values.pop(key)
        return [backend.take(sent) for sent in given]

    def _backward(self, replica: int, stage: Stage, m: int) -> None:
        functions, backend = (
            self._functions[replica, stage.index],
            self._backends[replica][stage.index],
        )
        key, keep = (replica, stage.index, m), self._plan.keeps(m)
        held, seeds = self._held.pop(key), self._seeds(backend, replica, stage, m)
        given_seeds = functions.seeds(seeds, self._loss_scale)
        known = {**self._known(replica, stage, m), **held, **given_seeds}
        if self._plan.is_apart:
            gradients, sums, self._held[key] = functions.input_gradient(known, again=not keep)
        else:
            gradients, sums = functions.backward(known, again=not keep)
        if functions.is_deferred(keep=keep):
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
        held = self._held.pop((replica, stage.index, m))
        functions.weight_gradient({**self._known(replica, stage, m), **held})
