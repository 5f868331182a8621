"""Evaluates a batch over the stages of a pipeline, with forward passes only.

Micro-batches follow each other. For a batch of any size, at most one micro-batch more is in flight
than there are stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.collected import Pairs, added_pairs
from tekso.framework.context import Examples
from tekso.framework.execution.base import Batch
from tekso.framework.execution.pipeline.actions import FORWARD, Action, WorkKey, device_of
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_backend import Specs, StageBackend
from tekso.framework.execution.pipeline.stage_run import run_pieces
from tekso.framework.execution.pipeline.stage_state import StageState
from tekso.framework.execution.pipeline.stages import BATCH, Stage
from tekso.framework.execution.pipeline.workers import Workers
from tekso.framework.nests import mapped
from tekso.framework.pieces import Flow
from tekso.framework.step import Flat, Step


class StageEvaluation:
    """The forward passes of evaluation, and the weights that they use.

    Args:
      step: steps of the task and the learner.
      plan: stages and micro-batches.
      state: the variables.
      specs: specs of the weights that every stage reads; of stacked weights, only its rows.
      backends: backends of the stages of the first replica, which runs evaluation.
    """

    def __init__(
        self,
        step: Step,
        plan: PipelinePlan,
        state: StageState,
        specs: Sequence[Specs],
        backends: Sequence[StageBackend],
    ) -> None:
        self._step, self._plan, self._state = step, plan, state
        self._specs, self.backends = specs, backends
        self._weights: list[Flat] | None = None
        self._gathered: Flat | None = None
        self._functions: dict[tuple[int, int, int], Callable[..., Any]] = {}

    def forget(self) -> None:
        """Discards the cached weights; must be called when the state has changed."""
        self._weights = self._gathered = None

    def _stage_weights(self) -> list[Flat]:
        """Returns the weights that every stage reads in evaluation, on its backend."""
        if self._weights is None:
            found = self._state.with_copies(self._state.evaluated(), replicas=1)
            self._weights = [found[0, stage.index] for stage in self._plan.stage_plan.stages]
        return self._weights

    def gathered(self, device: str) -> Flat:
        """Returns all weights as evaluation uses them, gathered on one device."""
        if self._gathered is None:
            stage_plan, found = self._plan.stage_plan, self._stage_weights()
            self._gathered = {}
            for path, holders in stage_plan.owners.items():
                read = holders[:1] if stage_plan.is_shared(path) else holders
                parts = [self.backends[i].gather(found[i][path]) for i in read]
                with tf.device(device):
                    whole = tf.concat(parts, 0) if len(parts) > 1 else tf.identity(parts[0])
                    self._gathered[path] = whole
        return self._gathered

    def step(self, batch: Batch, workers: Workers, name_of: Callable[[Any, Action], str]) -> Pairs:
        """Returns (sum, weight) of the loss and of every metric over a batch of any size."""
        plan, stages = self._plan, self._plan.stage_plan.stages
        run = _Pass(self, self._stage_weights(), batch, plan)
        order = [[] for _ in range(plan.num_devices)]  # type: list[list[Action]]
        for m, _ in enumerate(run.spans):
            for stage in stages:
                device = device_of(stage.index, plan.num_devices)
                order[device].append(Action(device, m + stage.index, stage.index, m, FORWARD))
        for actions in order:  # a device with several stages runs their actions by tick
            actions.sort(key=lambda action: action.tick)
        most, last = len(stages) + 1, len(stages) - 1  # one for each stage, and one in transfer

        def room(action: Action) -> list[WorkKey]:
            before = action.micro_batch - most
            return [(last, before, FORWARD)] if action.stage == 0 and before >= 0 else []

        workers.run(
            {(0, device): actions for device, actions in enumerate(order)},
            run.perform,
            num_stages=len(stages),
            name_of=name_of,
            also_needs=room,
        )
        return added_pairs(run.sums[key] for key in sorted(run.sums))

    def function(self, stage: Stage, size: int, examples: int) -> Callable[..., Any]:
        """Returns the forward pass of a stage over some examples of a batch of `size`."""
        key = stage.index, size, examples
        if key not in self._functions:
            backend, specs = self.backends[stage.index], self._specs[stage.index]

            def forward(weights: Flat, inputs: Flow, batch: Flow, offset: tf.Tensor) -> Any:
                start = backend.scalar_value(offset)
                own = Examples("eval", self._step.seed, 0, start, examples, size)
                ctx = backend.context(weights, specs, own)
                made, end = run_pieces(stage, self._step.task, weights, inputs, ctx)
                sums = self._step.evaluation_sums(end, batch, ctx)
                return made, tf.nest.map_structure(backend.replicated, sums)

            self._functions[key] = backend.compiled(forward)
        return self._functions[key]


class _Pass:
    """One pass over a batch; stores the tensors of each micro-batch that later stages read."""

    def __init__(
        self, evaluation: StageEvaluation, weights: list[Flat], batch: Batch, plan: PipelinePlan
    ) -> None:
        self._evaluation, self._weights, self._batch = evaluation, weights, batch
        self._stages = plan.stage_plan.stages
        self._size = len(next(iter(batch.values())))
        count = plan.micro_batch_size
        self.spans = [(i, min(i + count, self._size)) for i in range(0, self._size, count)]
        self.flows: dict[int, Flow] = {}
        self.sums: dict[tuple[int, int], Pairs] = {}
        readers = {value: stage.index for stage in self._stages for value in stage.inputs}
        self._last_read: dict[int, list[str]] = {stage.index: [] for stage in self._stages}
        for value, index in readers.items():
            if value.producer != BATCH:
                self._last_read[index].append(value.name)

    def perform(self, worker: Any, action: Action) -> None:
        """Runs a stage on a micro-batch; frees the tensors that no later stage reads."""
        stage, m = self._stages[action.stage], action.micro_batch
        backend = self._evaluation.backends[stage.index]
        start, end = self.spans[m]
        part = {name: array[start:end] for name, array in self._batch.items()}
        flow = self.flows.setdefault(m, {})
        inputs = {
            v.name: backend.put(part[v.name])
            if v.producer == BATCH
            else mapped(backend.take, flow[v.name])
            for v in stage.inputs
        }
        given = {name: backend.put(array) for name, array in part.items()} if stage.is_last else {}
        offset = backend.scalar(start, tf.int32)
        function = self._evaluation.function(stage, self._size, end - start)
        made, sums = backend.call(function, self._weights[stage.index], inputs, given, offset)
        for name in self._last_read[stage.index]:
            del flow[name]
        flow.update(mapped(backend.send, made))
        self.sums[m, stage.index] = tf.nest.map_structure(backend.local, sums)
        if stage.is_last:
            del self.flows[m]
