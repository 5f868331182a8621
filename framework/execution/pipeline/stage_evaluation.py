"""Evaluation over the stages of a pipeline: forward passes alone, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import LEARNER, WEIGHTS, Batch
from tekso.framework.execution.pipeline.actions import FORWARD, Action
from tekso.framework.execution.pipeline.setting import Setting
from tekso.framework.execution.pipeline.stage_state import Flat, StageState
from tekso.framework.execution.pipeline.stages import Stage
from tekso.framework.execution.pipeline.workers import Workers
from tekso.framework.learning_step import APPLIED
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, run_all

Sums = dict[str, tuple[Any, Any]]


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

    def step(self, batch: Batch, workers: Workers, name_of: Callable[[Any, Action], str]) -> Sums:
        """Returns (sum, weight) of the loss and of every metric over a batch of any size."""
        setting, weights = self._setting, self._stage_weights()
        size = len(next(iter(batch.values())))
        starts = range(0, size, setting.micro_batch_size)
        ends = [min(start + setting.micro_batch_size, size) for start in starts]
        parts = [
            {name: tf.convert_to_tensor(a[start:end]) for name, a in batch.items()}
            for start, end in zip(starts, ends, strict=True)
        ]
        flows: list[Flow] = [dict(part) for part in parts]
        sums: list[list[Sums]] = [[] for _ in parts]

        def perform(worker: Any, action: Action) -> None:
            stage, m = setting.plan.stages[action.stage], action.micro_batch
            with self._state.on(stage.index):
                function = self._function(stage, size, ends[m] - starts[m])
                offset = tf.constant(starts[m], tf.int32)
                inputs = {value.name: flows[m][value.name] for value in stage.inputs}
                made, found = function(weights[stage.index], inputs, parts[m], offset)
            flows[m].update(made)
            sums[m].append(found)

        order = [[] for _ in range(setting.num_devices)]  # type: list[list[Action]]
        tick = 0
        for m in range(len(parts)):
            for stage in setting.plan.stages:
                device = stage.index % setting.num_devices
                order[device].append(Action(device, tick, stage.index, m, FORWARD))
                tick += 1
        workers.run(
            {(0, device): actions for device, actions in enumerate(order)},
            perform,
            num_stages=len(setting.plan.stages),
            line_of=lambda worker: worker[0],
            name_of=name_of,
        )
        return added_pairs([one for of_part in sums for one in of_part])

    def _function(self, stage: Stage, size: int, examples: int) -> Callable[..., Any]:
        """The forward pass of a stage over some examples of a batch of `size`."""
        key = stage.index, size, examples
        if key not in self._functions:

            def forward(weights: Flat, inputs: Flow, batch: Flow, offset: tf.Tensor) -> Any:
                ctx = StepContext(
                    mode="eval", seed=self._seed, step=0, example_offset=offset, num_examples=size
                )
                flow = run_all(stage.pieces, weights, inputs, ctx)
                sums = dict(ctx.collected.sums["metric"])
                if stage.is_last:
                    weight = tf.cast(self._task.loss_weight(batch), flow[LOSS_SUM].dtype)
                    sums |= {"loss": (flow[LOSS_SUM], weight), **flow[METRICS]}
                return {name: flow[name] for name in stage.outputs}, sums

            self._functions[key] = tf.function(forward, autograph=False)
        return self._functions[key]


def added_pairs(parts: Iterable[Mapping[str, tuple[Any, Any]]]) -> Sums:
    """Returns the sums of the pairs of every name."""
    total: Sums = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before = total.get(name)
            total[name] = (
                (value, weight) if before is None else (before[0] + value, before[1] + weight)
            )
    return total
