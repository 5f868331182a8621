"""The program of the pipelined execution, driven from the host.

    batch ─► micro-batches ─► the schedule: a thread for every device calls compiled functions
    stage:   weights, what flows in ─► what flows out; backward: gradients in, gradients out
    then:    squared norms of all stages ─► one decision ─► every stage updates what it keeps

A value goes straight from the stage that makes it to those that read it, past all others; so do
gradients. A weight that several stages read is kept by the first of them: the others are given
copies, and their gradients are added to its own.

Source: Huang et al. 2018, "GPipe" (arXiv 1811.06965); `schedule.py` names those of the schedules.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.collected import added_pairs
from tekso.framework.execution.base import LEARNER, WEIGHTS, Batch
from tekso.framework.execution.pipeline.actions import BACKWARD, FORWARD, Action
from tekso.framework.execution.pipeline.host_program import HostProgram, added, converted
from tekso.framework.execution.pipeline.piece_traces import rows_of, tensors
from tekso.framework.execution.pipeline.setting import Setting
from tekso.framework.execution.pipeline.stage_evaluation import StageEvaluation
from tekso.framework.execution.pipeline.stage_functions import StageFunctions, Tensors
from tekso.framework.execution.pipeline.stage_state import Flat, StageState
from tekso.framework.execution.pipeline.stages import BATCH, Stage, Value
from tekso.framework.execution.pipeline.workers import Worker
from tekso.framework.learning_step import COUNTS, select
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.weight_spec import WeightSpec

Sums = dict[tuple[int, int, int], list[tf.Tensor]]
"""Flat sums of a stage, by first example of the part, micro-batch and replica: in a fixed order."""


class PipelineProgram(HostProgram):
    """See `Program`; `setting` has all that was decided before: stages, schedule, devices."""

    def __init__(self, task: Any, learner: Any, setting: Setting, *, seed: int) -> None:
        stages = setting.plan.stages
        num_workers = max(setting.num_replicas * setting.num_devices, len(stages))
        super().__init__(task, learner, setting, num_workers=num_workers, seed=seed)
        self._weight_specs: dict[str, WeightSpec] = task.specs()
        self._trained = learner.trainable(self._weight_specs)
        homes = [setting.device_of(0, s.index) for s in stages]
        self._state = StageState(setting.plan, learner, self._weight_specs, homes)
        self._functions: dict[Worker, StageFunctions] = {}  # by replica and stage
        self._updates = [
            tf.function(functools.partial(self._update_graph, s), autograph=False) for s in stages
        ]
        self._norms = [
            tf.function(functools.partial(self._norms_graph, s.index), autograph=False)
            for s in stages
        ]
        self._evaluation = StageEvaluation(task, learner, setting, self._state, seed=seed)
        self._is_traced = False  # the updates

    # --- training ---

    def _train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        self._prepare()
        self._workers.map(lambda functions: functions.begin(), list(self._functions.values()))
        total_weight = task_results.loss_weight(self._task, converted(batch))
        sums = self._summed(batch, step, total_weight)
        return self._update(sums, total_weight, step)

    def _summed(self, batch: Batch, step: int, total_weight: tf.Tensor) -> dict[int, Sums]:
        """Goes through the schedule; what it holds, the weights as they were, is free after it."""
        weights = self._read_weights()
        sums: dict[int, Sums] = collections.defaultdict(dict)
        self._run_parts(
            batch, lambda part, start: _Run(self, weights, part, start, step, total_weight, sums)
        )
        return sums

    def _prepare(self) -> None:
        """Traces and cuts the functions of all stages, before any thread calls them."""
        setting = self._setting
        for stage in setting.plan.stages:
            specs = {p: rows_of(self._weight_specs[p], r) for p, r in stage.weights.items()}
            for replica in range(setting.num_replicas):
                if (replica, stage.index) in self._functions:
                    continue
                functions = StageFunctions(
                    stage,
                    specs,
                    [path for path in specs if path in self._trained],
                    setting.plan,
                    seed=self._seed,
                    num_examples=setting.batch_size,
                    device=setting.device_of(replica, stage.index),
                    fuse=XlaFusion() if setting.xla == "stretches" else no_fusion,
                )
                functions.prepare(
                    keep=setting.keeps_some, again=setting.recomputes_some, apart=setting.is_apart
                )
                self._functions[replica, stage.index] = functions

    def _read_weights(self) -> dict[tuple[int, int], Tensors]:
        """The weights that every stage reads, by replica, on its device, by their names there."""
        setting = self._setting
        own = [self._state.read(stage.index, WEIGHTS) for stage in setting.plan.stages]
        found = {}
        for stage in setting.plan.stages:
            for replica in range(setting.num_replicas):
                flat = {}
                with tf.device(setting.device_of(replica, stage.index)):
                    for path in stage.weights:
                        is_own = path in own[stage.index]
                        value = own[stage.index if is_own else setting.plan.owners[path][0]][path]
                        flat[path] = value if is_own and not replica else tf.identity(value)
                    functions = self._functions[replica, stage.index]
                    found[replica, stage.index] = functions.weights(flat)
        return found

    # --- the update ---

    def _update(
        self,
        sums: dict[int, Sums],
        total_weight: tf.Tensor,
        step: int,
    ) -> dict[str, Any]:
        stages = self._setting.plan.stages
        by_stage = []
        for stage in stages:
            rows = sums[stage.index]
            flat = [added(column) for column in zip(*(rows[k] for k in sorted(rows)), strict=True)]
            by_stage.append(self._functions[0, stage.index].sums(flat))
        gradients = self._gradients()
        norms = self._workers.map(
            lambda s: self._on(s, self._norms[s], gradients[s]), range(len(stages))
        )
        statistics = self._statistics(by_stage)
        squares = added_pairs(norms)  # of stacked weights, every stage has those of its rows
        total = self._total(by_stage)
        kept = self._state.variables(0)
        counts = {name: kept[LEARNER + name].read_value() for name in COUNTS}
        at = tf.constant(step, tf.int64)
        with self._state.on(0):
            decision = self._decide(squares, counts, at, total)

        given = self._workers.map(
            lambda s: (gradients[s.index], *self._taken(s, decision, statistics)), stages
        )
        if not self._is_traced:  # a mistake in an optimizer is found before anything is changed
            for s, update in enumerate(self._updates):
                self._on(s, update.get_concrete_function, *given[s])
            self._is_traced = True
        self._workers.map(lambda s: self._on(s, self._updates[s], *given[s]), range(len(stages)))
        return self._reported(by_stage, total, total_weight, decision)

    def _taken(self, stage: Stage, decision: Any, statistics: Sequence[Any]) -> Any:
        """What an update reads besides gradients, on the device of the stage.

        An update has no outputs: it counts as done, and what it was given is freed, before it has
        read what lies elsewhere.
        """
        counts = decision.counts if stage.index == 0 else {}
        read = decision._replace(counts=counts, metrics={})
        with self._state.on(stage.index):
            return tf.nest.map_structure(_here_if_any, (read, statistics[stage.index]))

    def _on(self, stage: int, function: Callable[..., Any], *args: Any) -> Any:
        with self._state.on(stage):
            return function(*args)

    def _gradients(self) -> list[Flat]:
        """The gradients of what every stage keeps: of all replicas, and of those with copies."""
        plan = self._setting.plan
        gradients: list[dict[str, list[tf.Tensor]]] = [
            collections.defaultdict(list) for _ in plan.stages
        ]
        for (_, index), functions in sorted(self._functions.items()):
            for path, value in functions.gradients().items():
                owner = plan.owners[path][0] if plan.is_shared(path) else index
                gradients[owner][path].append(value)
        found = []
        for stage, by_path in enumerate(gradients):
            with self._state.on(stage):
                found.append({path: added(values) for path, values in by_path.items()})
        return found

    def _norms_graph(self, stage: int, gradients: Flat) -> Any:
        """One weight after the other: all their squares at once take as much as the gradients."""
        found: dict[str, Any] = {}
        for name, (learner, own) in self._state.groups[stage].items():
            for path, spec in own.items():
                with tf.control_dependencies([t for pair in found.values() for t in pair][-2:]):
                    group = {name: (learner, {path: spec})}
                    found |= self._learner.squared_norms(group, {path: gradients[path]})
        return found

    def _update_graph(self, stage: Stage, gradients: Flat, decision: Any, statistics: Any) -> None:
        """Updates what a stage keeps in its place, one weight after the other.

        So the old and the new value are there of one weight at a time, and not of all.
        """
        variables = self._state.variables(stage.index)
        owned = self._setting.plan.owned(stage.index)
        weights = {path: variables[WEIGHTS + path].read_value() for path in owned}
        means = {name: tf.math.divide_no_nan(*pair) for name, pair in statistics.items()}
        changed = self._learner.without_frozen(self._task.new_statistics(weights, means))
        new = {WEIGHTS + p: select(decision.finite, v, weights[p]) for p, v in changed.items()}
        if stage.index == 0:
            new |= {LEARNER + path: value for path, value in decision.counts.items()}
        done = [variables[key].assign(value, read_value=False) for key, value in new.items()]
        for name, (learner, own) in self._state.groups[stage.index].items():
            for path, spec in own.items():
                slots = [made.path for made in learner.slots_of(spec).values()]
                with tf.control_dependencies(done):
                    new_weights, new_slots = self._learner.apply(
                        {name: (learner, {path: spec})},
                        {path: variables[WEIGHTS + path].read_value()},
                        {path: gradients[path]},
                        {slot: variables[LEARNER + slot].read_value() for slot in slots},
                        decision,
                    )
                    new = {WEIGHTS + p: value for p, value in new_weights.items()}
                    new |= {LEARNER + p: value for p, value in new_slots.items()}
                    done = [variables[k].assign(v, read_value=False) for k, v in new.items()]


class _Run:
    """One pass of the schedule: what is alive between the actions."""

    def __init__(
        self,
        program: PipelineProgram,
        weights: dict[tuple[int, int], Tensors],
        batch: Mapping[str, np.ndarray],
        start: int,
        step: int,
        total_weight: tf.Tensor,
        sums: dict[int, Sums],
    ) -> None:
        setting = program._setting
        self._setting, self._functions = setting, program._functions
        self._weights, self._start, self._sums = weights, start, sums
        self._step, self._total_weight = tf.constant(step, tf.int64), total_weight
        self._one = tf.constant(1.0)
        self._lock = threading.Lock()
        size = setting.micro_batch_size
        per_micro = size * setting.num_replicas
        self._batch = {
            (replica, m): {
                name: array[m * per_micro + replica * size :][:size]
                for name, array in batch.items()
            }
            for m in range(setting.num_micro_batches)
            for replica in range(setting.num_replicas)
        }
        self._per_micro, self._size = per_micro, size
        self._values: dict[Any, list[tf.Tensor]] = {}
        self._readers = collections.Counter(
            value for stage in setting.plan.stages for value in stage.inputs
        )
        self._left: dict[Any, int] = {}
        self._gradients: dict[Any, list[tf.Tensor]] = {}
        self._held: dict[Any, Tensors] = {}

    def perform(self, worker: Worker, action: Action) -> None:
        """Does one action of a worker."""
        replica, stage = worker[0], self._setting.plan.stages[action.stage]
        with tf.device(self._setting.device_of(replica, stage.index)):
            if action.kind == FORWARD:
                self._forward(replica, stage, action.micro_batch)
            elif action.kind == BACKWARD:
                self._backward(replica, stage, action.micro_batch)
            else:
                self._weight_gradient(replica, stage, action.micro_batch)

    def _common(self, replica: int, stage: Stage, m: int) -> Tensors:
        offset = self._start + m * self._per_micro + replica * self._size
        functions = self._functions[replica, stage.index]
        scalars = functions.scalars(
            *_here([tf.constant(offset, tf.int32), self._step, self._total_weight])
        )
        return {**self._weights[replica, stage.index], **scalars}

    def _forward(self, replica: int, stage: Stage, m: int) -> None:
        functions = self._functions[replica, stage.index]
        given = [t for value in stage.inputs for t in self._take(value, replica, m)]
        inputs = functions.inputs(_here(given))
        keep = self._setting.keeps(m)
        known = {**self._common(replica, stage, m), **inputs}
        outputs, sums, kept = functions.forward(known, keep=keep)
        self._held[replica, stage.index, m] = kept if keep else inputs
        made = iter(outputs)
        for name in stage.outputs:
            value = Value(name, stage.index)
            count = len(tensors(self._setting.plan.values[value]))
            self._values[value, replica, m] = [next(made) for _ in range(count)]
            self._left[value, replica, m] = self._readers[value]
        with self._lock:
            self._sums[stage.index][self._start, m, replica] = sums

    def _take(self, value: Value, replica: int, m: int) -> list[tf.Tensor]:
        """The flat tensors of a value; the last reader takes it away."""
        if value.producer == BATCH:
            return [tf.convert_to_tensor(self._batch[replica, m][value.name])]
        key = value, replica, m
        with self._lock:
            self._left[key] -= 1
            return self._values[key] if self._left[key] else self._values.pop(key)

    def _late(self, replica: int, stage: Stage, m: int) -> Tensors:
        """The gradients of what a stage made."""
        flat = [
            t
            for name in stage.outputs
            for t in self._gradients.pop((Value(name, stage.index), replica, m), [])
        ]
        *flat, one = _here([*flat, self._one])
        return self._functions[replica, stage.index].seeds(flat, one)

    def _backward(self, replica: int, stage: Stage, m: int) -> None:
        functions, setting = self._functions[replica, stage.index], self._setting
        key, again = (replica, stage.index, m), not setting.keeps(m)
        held, late = self._held.pop(key), self._late(replica, stage, m)
        known = {**self._common(replica, stage, m), **held, **late}
        if setting.is_apart:
            gradients, self._held[key] = functions.input_gradient(known, again=again)
        else:
            gradients = functions.backward(known, again=again)
        self._hand_back(replica, stage, m, gradients)

    def _hand_back(
        self, replica: int, stage: Stage, m: int, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Gives gradients of inputs to the stages that made them."""
        given = iter(gradients)
        for value in stage.inputs:
            if value.producer == BATCH:
                continue
            own = [next(given) for is_learned in self._setting.plan.learned(value) if is_learned]
            key = value, replica, m
            before = self._gradients.get(key)
            self._gradients[key] = (
                own if before is None else [a + b for a, b in zip(before, own, strict=True)]
            )

    def _weight_gradient(self, replica: int, stage: Stage, m: int) -> None:
        functions = self._functions[replica, stage.index]
        held = self._held.pop((replica, stage.index, m))
        functions.weight_gradient({**self._common(replica, stage, m), **held})


def _here_if_any(value: tf.Tensor | None) -> tf.Tensor | None:
    return None if value is None else tf.identity(value)


def _here(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Brings values to the device of the caller: functions that get others are cut in two."""
    return [tf.identity(value) for value in values]
