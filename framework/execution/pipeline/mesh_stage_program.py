"""The program of a pipeline whose stages lie on meshes of their own, driven from the host.

    a device of the schedule is a mesh, and a stage is split over it by layout rules
    forward, backward      DTensor programs of one mesh; a thread for every mesh calls them
    what flows             leaves a mesh as parts, and enters the next one as it lay
    then                   squared norms of all ─► one decision on the host ─► updates

Source: Huang et al. 2018, "GPipe"; Shazeer et al. 2018, "Mesh-TensorFlow".
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.collected import added_pairs
from tekso.framework.execution.base import Batch
from tekso.framework.execution.mesh import step_context
from tekso.framework.execution.pipeline.actions import BACKWARD, FORWARD, Action, device_of
from tekso.framework.execution.pipeline.host_program import HostProgram, added, converted
from tekso.framework.execution.pipeline.mesh_stage_evaluation import (
    MeshStageEvaluation,
    with_copies,
)
from tekso.framework.execution.pipeline.mesh_stage_functions import MeshStageFunctions
from tekso.framework.execution.pipeline.mesh_stage_state import MeshStageState
from tekso.framework.execution.pipeline.piece_traces import rows_of, tensors
from tekso.framework.execution.pipeline.setting import Setting
from tekso.framework.execution.pipeline.stage_mesh import Parts, StageMesh, local, wait_for
from tekso.framework.execution.pipeline.stage_state import Flat
from tekso.framework.execution.pipeline.stages import BATCH, Stage, Value

Sums = dict[tuple[int, int], Any]
"""Sums of a stage, by first example of the part and micro-batch."""


class MeshStageProgram(HostProgram):
    """See `Program`.

    Args:
      task: the task.
      learner: the learner.
      setting: stages, schedule, and the devices of every mesh by a name.
      meshes: in the order of the schedule's devices.
      activation_dtype: type in which a step computes.
      seed: of weights and of all randomness in the steps.
    """

    _state: MeshStageState

    def __init__(
        self,
        task: Any,
        learner: Any,
        setting: Setting,
        meshes: Sequence[StageMesh],
        *,
        activation_dtype: str,
        seed: int,
    ) -> None:
        super().__init__(task, learner, setting, num_workers=setting.num_devices, seed=seed)
        specs, stages = task.specs(), setting.plan.stages
        self._meshes = [meshes[device_of(s.index, setting.num_devices)] for s in stages]
        self._state = MeshStageState(setting.plan, learner, specs, self._meshes)
        self._functions = [
            MeshStageFunctions(
                stage,
                {p: rows_of(specs[p], r) for p, r in stage.weights.items()},
                setting.plan,
                mesh=self._meshes[stage.index],
                state=self._state,
                task=task,
                learner=learner,
                seed=seed,
                num_examples=setting.batch_size,
                micro_batch_size=setting.micro_batch_size,
                dtype=tf.as_dtype(activation_dtype),
            )
            for stage in stages
        ]
        self._evaluation = MeshStageEvaluation(
            task,
            learner,
            setting,
            self._state,
            meshes=self._meshes,
            functions=self._functions,
            seed=seed,
        )

    # --- training ---

    def _train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        plan = self._setting.plan
        for functions in self._functions:
            functions.begin()
        total_weight = task_results.loss_weight(self._task, converted(batch))
        weights = with_copies(plan.stages, plan.owners, self._meshes, self._read, self._state)
        sums: dict[int, Sums] = collections.defaultdict(dict)

        def run_of(part: Batch, start: int) -> _Run:
            run = _Run(self._setting, self._meshes, self._functions, weights, part, start, sums)
            run.place_scalars(step, total_weight)
            return run

        self._run_parts(batch, run_of)
        return self._update(sums, total_weight, step)

    def _read(self, stage: int) -> Flat:
        weights: Flat = self._meshes[stage].ask(self._functions[stage].read)
        return weights

    # --- the update ---

    def _update(self, sums: dict[int, Sums], total_weight: tf.Tensor, step: int) -> dict[str, Any]:
        stages = self._setting.plan.stages
        by_stage = [
            tf.nest.map_structure(lambda *x: added(x), *(rows[key] for key in sorted(rows)))
            for rows in (sums[s.index] for s in stages)
        ]
        others = self._totals_of_copies()
        # All meshes are asked before any is waited for.
        asked = [
            self._meshes[i].ask(self._functions[i].norms, others[i])
            for i in self._state.learning_stages()
        ]
        squares = added_pairs(local(tf.nest.map_structure(Parts.of, found)) for found in asked)
        total = self._total(by_stage)
        at = tf.constant(step, tf.int64)
        decision = self._decide(squares, self._state.counts(), at, total)
        statistics = self._statistics(by_stage)
        done = []
        for stage in stages:
            if not self._state.keeps_weights(stage.index):
                continue
            mesh = self._meshes[stage.index]
            taken = {
                "finite": mesh.spread_scalar(decision.finite),
                "factors": {
                    n: None if f is None else mesh.spread_scalar(f)
                    for n, f in decision.factors.items()
                },
                "rates": {name: mesh.spread_scalar(rate) for name, rate in decision.rates.items()},
                "applied": mesh.spread_scalar(decision.applied),
            }
            given = tf.nest.map_structure(mesh.spread, statistics[stage.index])
            update = self._functions[stage.index].update
            done.append(mesh.ask(update, others[stage.index], taken, given))
        self._state.set_counts(decision.counts)
        for flag in done:
            wait_for(Parts.of(flag))
        return self._reported(by_stage, total, total_weight, decision)

    def _totals_of_copies(self) -> list[dict[str, list[tf.Tensor]]]:
        """For every stage, gradients of what it keeps from the stages that have copies of it."""
        plan = self._setting.plan
        found: list[dict[str, list[tf.Tensor]]] = [
            collections.defaultdict(list) for _ in plan.stages
        ]
        for stage in plan.stages:
            for path, total in self._functions[stage.index].totals.items():
                owner = plan.owners[path][0]
                if plan.is_shared(path) and owner != stage.index:
                    given = Parts.of(total.read_value())
                    found[owner][path].append(self._meshes[owner].take(given))
        return [dict(each) for each in found]


class _Run:
    """One pass of the schedule: what is alive between the actions."""

    def __init__(
        self,
        setting: Setting,
        meshes: Sequence[StageMesh],
        functions: Sequence[MeshStageFunctions],
        weights: Sequence[Flat],
        batch: Mapping[str, np.ndarray],
        start: int,
        sums: dict[int, Sums],
    ) -> None:
        self._setting, self._meshes, self._functions = setting, meshes, functions
        self._weights, self._batch, self._start, self._sums = weights, batch, start, sums
        self._lock = threading.Lock()
        self._readers = collections.Counter(v for s in setting.plan.stages for v in s.inputs)
        self._values: dict[Any, list[Parts]] = {}
        self._left: dict[Any, int] = {}
        self._gradients: dict[Any, list[list[Parts]]] = collections.defaultdict(list)
        self._held: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._scalars: list[tuple[tf.Tensor, tf.Tensor]] = []

    def place_scalars(self, step: int, total_weight: tf.Tensor) -> None:
        """Gives every stage what it needs of the step."""
        self._scalars = [
            (mesh.put_number(step, np.int64), mesh.spread_scalar(total_weight))
            for mesh in self._meshes
        ]

    def perform(self, worker: tuple[int, int], action: Action) -> None:
        """Does one action of a worker."""
        stage = self._setting.plan.stages[action.stage]
        does = {FORWARD: self._forward, BACKWARD: self._backward}[action.kind]
        does(stage, action.micro_batch)

    def _known(self, stage: Stage, m: int) -> tuple[Any, ...]:
        offset = self._start + m * self._setting.micro_batch_size
        placed = self._meshes[stage.index].put_number(offset, np.int32)
        return placed, *self._scalars[stage.index]

    def _forward(self, stage: Stage, m: int) -> None:
        mesh, functions = self._meshes[stage.index], self._functions[stage.index]
        inputs = [t for value in stage.inputs for t in self._take(mesh, value, m)]
        self._held[stage.index, m] = inputs
        if not stage.outputs:  # all else comes from the backward pass
            return
        weights = self._weights[stage.index]
        made = iter(mesh.call(functions.forward, weights, inputs, self._known(stage, m)))
        for name in stage.outputs:
            value = Value(name, stage.index)
            self._values[value, m] = [next(made) for _ in tensors(self._setting.plan.values[value])]
            self._left[value, m] = self._readers[value]

    def _take(self, mesh: StageMesh, value: Value, m: int) -> list[tf.Tensor]:
        """The flat tensors of a value, on the mesh of a reader; the last one takes it away."""
        if value.producer == BATCH:
            size = self._setting.micro_batch_size
            array = self._batch[value.name][m * size :][:size]
            axis = step_context.batch_axis(mesh.layout, size)
            return [mesh.put(array, (axis,) + (None,) * (array.ndim - 1))]
        key = value, m
        with self._lock:
            self._left[key] -= 1
            given = self._values[key] if self._left[key] else self._values.pop(key)
        return [mesh.take(parts) for parts in given]

    def _backward(self, stage: Stage, m: int) -> None:
        mesh, functions = self._meshes[stage.index], self._functions[stage.index]
        inputs, seeds = self._held.pop((stage.index, m)), self._late(mesh, stage, m)
        weights = self._weights[stage.index]
        gradients, sums = mesh.call(
            functions.backward, weights, inputs, seeds, self._known(stage, m)
        )
        with self._lock:
            self._sums[stage.index][self._start, m] = local(sums)
        given = iter(gradients)
        for value in stage.inputs:
            if value.producer != BATCH:
                learned = self._setting.plan.learned(value)
                self._gradients[value, m].append([next(given) for found in learned if found])

    def _late(self, mesh: StageMesh, stage: Stage, m: int) -> list[tf.Tensor]:
        """The gradients of what a stage made, those of all its readers added up."""
        found = []
        for name in stage.outputs:
            of_readers = self._gradients.pop((Value(name, stage.index), m), [])
            for column in zip(*of_readers, strict=True):
                placed = [mesh.take(parts) for parts in column]
                found.append(placed[0] if len(placed) == 1 else mesh.ask(tf.add_n, placed))
        return found
