"""Evaluation over the stages of a pipeline: forward passes alone.

Micro-batches follow each other; those that are on their way at once are as many as there are
stages, and one more, however large the batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.collected import Pairs, added_pairs
from tekso.framework.context import StepContext
from tekso.framework.execution.base import LEARNER, WEIGHTS, Batch
from tekso.framework.execution.pipeline.actions import FORWARD, Action, WorkKey, device_of
from tekso.framework.execution.pipeline.setting import Setting
from tekso.framework.execution.pipeline.stage_state import Flat, StageState
from tekso.framework.execution.pipeline.stages import BATCH, Stage
from tekso.framework.execution.pipeline.workers import Workers
from tekso.framework.learning_step import APPLIED
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, run_all
from tekso.framework.task import LossSums


class StageEvaluation:
    """The forward passes of evaluation, and the weights that they use."""

    def __init__(
        self, task: Any, learner: Any, setting: Setting, state: StageState, *, seed: int
    ) -> None:
        self._task, self._learner, self._setting, self._state = task, learner, setting, state
        self._seed = seed
        self._weights: list[Flat] | None = None
        self._gathered: Flat | None = None
        self._functions: dict[tuple[int, int, int], Callable[..., Any]] = {}

    def forget(self) -> None:
        """The state was changed."""
        self._weights = self._gathered = None

    def _stage_weights(self) -> list[Flat]:
        """The weights that every stage reads, as they are evaluated, on its device."""
        if self._weights is None:
            plan, state = self._setting.plan, self._state
            applied = state.read(0, LEARNER)[APPLIED]
            own = []
            for stage in plan.stages:
                with state.on(stage.index):
                    weights = state.read(stage.index, WEIGHTS)
                    slots = {**state.read(stage.index, LEARNER), APPLIED: applied}
                    own.append(self._learner.evaluation_weights(weights, slots))
            self._weights = []
            for stage in plan.stages:
                with state.on(stage.index):
                    flat = {
                        path: own[stage.index][path]
                        if path in own[stage.index]
                        else tf.identity(own[plan.owners[path][0]][path])
                        for path in stage.weights
                    }
                self._weights.append(flat)
        return self._weights

    def gathered(self) -> Flat:
        """Returns all weights as they are evaluated, on the device of the first stage."""
        if self._gathered is None:
            plan, found = self._setting.plan, self._stage_weights()
            with self._state.on(0):
                self._gathered = {
                    path: tf.concat([found[i][path] for i in holders], 0)
                    if len(holders) > 1 and not plan.is_shared(path)
                    else tf.identity(found[holders[0]][path])
                    for path, holders in plan.owners.items()
                }
        return self._gathered

    def step(self, batch: Batch, workers: Workers, name_of: Callable[[Any, Action], str]) -> Pairs:
        """Returns (sum, weight) of the loss and of every metric over a batch of any size."""
        setting, stages = self._setting, self._setting.plan.stages
        run = _Pass(self, self._stage_weights(), batch)
        order = [[] for _ in range(setting.num_devices)]  # type: list[list[Action]]
        for m, _ in enumerate(run.spans):
            for stage in stages:
                device = device_of(stage.index, setting.num_devices)
                order[device].append(Action(device, m + stage.index, stage.index, m, FORWARD))
        for actions in order:  # of several stages a device, the first goes on to the next ones
            actions.sort(key=lambda action: action.tick)
        most, last = len(stages) + 1, len(stages) - 1  # one for each stage, and one on its way

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
        """The forward pass of a stage over some examples of a batch of `size`."""
        key = stage.index, size, examples
        if key not in self._functions:

            def forward(weights: Flat, inputs: Flow, batch: Flow, offset: tf.Tensor) -> Any:
                ctx = StepContext(
                    mode="eval", seed=self._seed, step=0, example_offset=offset, num_examples=size
                )
                flow = run_all(stage.pieces, weights, inputs, ctx)
                end = LossSums(flow[LOSS_SUM], flow[METRICS]) if stage.is_last else None
                sums = ctx.collected.reported(end.metrics if end else {})
                if end:
                    weight = task_results.loss_weight(self._task, batch)
                    sums["loss"] = (end.loss_sum, tf.cast(weight, end.loss_sum.dtype))
                return {name: flow[name] for name in stage.outputs}, sums

            self._functions[key] = tf.function(forward, autograph=False)
        return self._functions[key]


class _Pass:
    """One pass over a batch: what is alive between the stages, of each micro-batch."""

    def __init__(self, evaluation: StageEvaluation, weights: list[Flat], batch: Batch) -> None:
        self._evaluation, self._weights, self._batch = evaluation, weights, batch
        setting = evaluation._setting
        self._stages = setting.plan.stages
        self._size = len(next(iter(batch.values())))
        count = setting.micro_batch_size
        self.spans = [(i, min(i + count, self._size)) for i in range(0, self._size, count)]
        self.flows: dict[int, Flow] = {}
        self.sums: dict[tuple[int, int], Pairs] = {}
        readers = {value: stage.index for stage in self._stages for value in stage.inputs}
        self._last_read: dict[int, list[str]] = {stage.index: [] for stage in self._stages}
        for value, index in readers.items():
            if value.producer != BATCH:
                self._last_read[index].append(value.name)

    def perform(self, worker: Any, action: Action) -> None:
        """Runs a stage on a micro-batch; what no other stage reads is given up."""
        stage, m = self._stages[action.stage], action.micro_batch
        start, end = self.spans[m]
        part = {name: array[start:end] for name, array in self._batch.items()}
        flow = self.flows.setdefault(m, {})
        with self._evaluation._state.on(stage.index):
            function = self._evaluation.function(stage, self._size, end - start)
            inputs = {
                v.name: tf.convert_to_tensor(part[v.name]) if v.producer == BATCH else flow[v.name]
                for v in stage.inputs
            }
            given = {n: tf.convert_to_tensor(a) for n, a in part.items()} if stage.is_last else {}
            offset = tf.constant(start, tf.int32)
            made, sums = function(self._weights[stage.index], inputs, given, offset)
        for name in self._last_read[stage.index]:
            del flow[name]
        flow.update(made)
        self.sums[m, stage.index] = sums
        if stage.is_last:
            del self.flows[m]
