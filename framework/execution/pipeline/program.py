"""The program of the pipelined execution whose stages the host drives.

    batch ─► micro-batches ─► the schedule: a thread for every device calls compiled functions
    stage:   weights, inputs ─► outputs; backward: gradients of outputs ─► gradients of inputs
    then:    squared norms of all stages ─► one decision ─► every stage updates its variables

A stage runs on a backend: one device, or a mesh of devices (see stage_backend.py). If several
stages read a weight, the first of them stores it. The others get copies, and the gradients of the
copies are added to the gradient of the first stage.

Source: Huang et al. 2018, "GPipe" (arXiv 1811.06965); for the schedules, see `schedule.py`.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.batch_sums import Sums, added, joined_sums
from tekso.framework.collected import added_pairs
from tekso.framework.costs.piece_traces import rows_of
from tekso.framework.execution.base import (
    Batch,
    ExecutionProgram,
    num_examples_of,
    signature_of,
    traced,
)
from tekso.framework.execution.pipeline import remote
from tekso.framework.execution.pipeline.actions import Action, Event
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.schedule_run import ScheduleRun
from tekso.framework.execution.pipeline.stage_backend import StageBackend
from tekso.framework.execution.pipeline.stage_evaluation import StageEvaluation
from tekso.framework.execution.pipeline.stage_functions import StageFunctions
from tekso.framework.execution.pipeline.stage_state import StageState, assembled, storable
from tekso.framework.execution.pipeline.stage_update import CopyGradients, StageUpdate
from tekso.framework.execution.pipeline.workers import StageError, Worker, Workers, line_with_reason
from tekso.framework.execution.shards import Shard
from tekso.framework.execution.state import ReadKey
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.execution.workarounds.call_counts import counted_alone
from tekso.framework.exit_codes import ExitCode
from tekso.framework.signature import Signature
from tekso.framework.step import Flat, Step
from tekso.framework.theta import SEPARATOR

Functions = dict[tuple[int, int], StageFunctions]
"""By replica and stage."""


class PipelineProgram(ExecutionProgram):
    """See `ExecutionProgram`.

    Args:
      step: steps of the task and the learner.
      plan: stages, schedule, micro-batches.
      backends: backends of the stages of every replica, [replica][stage].
      batch: signature of the batches that the plan is for.
      replan: returns the plan for batches of another signature, with the same stages.

    Attributes:
      plan: plan of the batches of the last training step.
      events: the actions of every worker in the last training step, with start and end.
    """

    def __init__(
        self,
        step: Step,
        plan: PipelinePlan,
        backends: Sequence[Sequence[StageBackend]],
        *,
        batch: Signature,
        replan: Callable[[Signature], PipelinePlan],
    ) -> None:
        super().__init__(step)
        self.plan, self._backends = plan, backends
        stages, specs = plan.stage_plan.stages, step.specs.weights
        self._specs = [{p: rows_of(specs[p], r) for p, r in s.weights.items()} for s in stages]
        self._state = StageState(plan.stage_plan, step, backends)
        self._evaluation = StageEvaluation(step, plan, self._state, self._specs, backends[0])
        num_workers = max(plan.num_replicas * plan.num_devices, len(stages))
        self._workers, self._gate = Workers(num_workers), UpdateGate()
        self._decide = counted_alone(tf.function(step.decide, autograph=False))
        self._replan, self._first = replan, (_shape(batch), plan)
        self._functions: Functions = {}
        self._by_shape: dict[Any, tuple[PipelinePlan, Functions]] = {}
        self._updates: list[StageUpdate] = []
        self._is_traced = False  # the updates
        self._calls: dict[Any, Callable[..., Any]] = {}
        self.events: dict[Worker, list[Event]] = {}

    # --- state ---

    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        """See `ExecutionProgram`."""
        self._state.assign(value, keys)
        self._evaluation.forget()

    def state(self, keys: Set[str] | None = None) -> dict[str, np.ndarray]:
        """See `ExecutionProgram`."""
        return assembled(s for s in self._state.shards() if keys is None or s.key in keys)

    def shards(self) -> Iterator[Shard]:
        """See `ExecutionProgram`."""
        return storable(self._state.shards())

    def hold_updates(self, gate: UpdateGate) -> bool:
        """See `ExecutionProgram`."""
        self._gate = gate
        return True

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `ExecutionProgram`."""
        num_examples_of(batch)  # checks that all arrays have one
        self._evaluation.forget()
        with self._lost_are_named():
            self._prepare(signature_of(batch))
            self._workers.map(lambda functions: functions.begin(), list(self._functions.values()))
            tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
            total_weight = self._step.loss_weight(tensors)
            sums = self._summed(batch, step, total_weight)
            self._gate.wait()
            return self._update(sums, total_weight, step)

    def _prepare(self, batch: Signature) -> None:
        """Traces and cuts the functions of all stages for batches of one shape, once for each.

        It is done before any thread calls them.
        """
        shape = _shape(batch)
        if shape not in self._by_shape:
            first, plan = self._first
            plan = plan if shape == first else self._replan(batch)
            self._by_shape[shape] = plan, self._functions_of(plan)
        self.plan, self._functions = self._by_shape[shape]
        if not self._updates:
            self._make_updates()

    def _functions_of(self, plan: PipelinePlan) -> Functions:
        made: Functions = {}
        for replica, backends in enumerate(self._backends):
            for stage, backend in zip(plan.stage_plan.stages, backends, strict=True):
                known = self._functions.get((replica, stage.index))
                made[replica, stage.index] = StageFunctions(
                    stage,
                    self._specs[stage.index],
                    plan,
                    self._step,
                    backend,
                    totals=known.totals if known else None,
                )
        return made

    def _make_updates(self) -> None:
        plan = self.plan
        for stage, backend in zip(plan.stage_plan.stages, self._backends[0], strict=True):
            owned, specs = plan.stage_plan.owned(stage.index), self._specs[stage.index]
            update = StageUpdate(
                stage.index,
                {path: specs[path] for path in owned},
                self._step,
                self._state,
                self._functions[0, stage.index].totals,
                backend,
            )
            self._updates.append(update)

    def _summed(self, batch: Batch, step: int, total_weight: tf.Tensor) -> list[Sums]:
        """Runs the schedule for every part of a batch; returns the sums of every stage.

        The copies of the weights that the step used are freed when this returns.
        """
        plan, stages = self.plan, self.plan.stage_plan.stages
        weights = self._state.with_copies(self._state.used(), replicas=plan.num_replicas)
        self.events = collections.defaultdict(list)
        size = plan.batch_size // plan.num_parts
        loss_scale = self._step.loss_scale(self._state.counts())
        by_stage: list[list[Any]] = [[] for _ in stages]
        for start in range(0, plan.batch_size, size):
            result = ScheduleRun(
                plan,
                self._functions,
                self._backends,
                weights,
                {name: array[start : start + size] for name, array in batch.items()},
                start,
                step=step,
                total_weight=total_weight,
                loss_scale=loss_scale,
            ).run(self._workers, self._name_of)
            for total, sums in zip(by_stage, result.sums, strict=True):
                total += sums
            for worker, events in result.events.items():
                self.events[worker] += events
        return [self._functions[0, s.index].sums(added(by_stage[s.index])) for s in stages]

    @contextlib.contextmanager
    def _lost_are_named(self) -> Iterator[None]:
        """Adds to every error in a step the names of devices that do not answer.

        If a process is lost, a stage on another process may fail first, and TensorFlow may raise
        Unavailable, Internal or Cancelled. So the only reliable test is to call every device.

        Raises:
          StageError: the step failed; also for TensorFlow errors outside of the schedule.
        """
        try:
            yield
        except (tf.errors.OpError, StageError) as error:
            said = str(error) if isinstance(error, StageError) else _reason(error)
            lost = remote.lost([name for row in self.plan.devices for name in row])
            if lost:
                said += f"; lost: {', '.join(lost)}"
            raised = StageError(said)
            raised.exit_code = ExitCode.PROCESS_LOST if lost else ExitCode.FAILED
            raise raised from (error.__cause__ or error)

    def _name_of(self, worker: Worker, action: Action) -> str:
        names = self.plan.stage_plan.stages[action.stage].piece_names
        pieces = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"{action.work} ({pieces}) on {self.plan.device_of(worker[0], action.stage)}"

    # --- the update ---

    def _update(
        self, by_stage: Sequence[Sums], total_weight: tf.Tensor, step: int
    ) -> dict[str, Any]:
        others = self._gradients_of_copies()
        pairs = list(zip(self._updates, others, strict=True))
        norms = self._workers.map(lambda pair: pair[0].squared_norms(pair[1]), pairs)
        statistics = self._statistics(by_stage)
        squares = added_pairs(norms)  # for a stacked weight, a stage has the norms of its rows
        whole = joined_sums(by_stage)
        at = tf.constant(step, tf.int64)
        decision = self._decide(squares, self._state.counts(), at, whole.total)

        def placed(stage: int) -> tuple[Any, ...]:
            return others[stage], *self._updates[stage].placed(decision, statistics[stage])

        given = self._workers.map(placed, range(len(self._updates)))
        if not self._is_traced:
            for update, args in zip(self._updates, given, strict=True):
                update.trace(*args)
            self._is_traced = True
        both = list(zip(self._updates, given, strict=True))
        self._workers.map(lambda each: each[0].update(*each[1]), both)
        self._state.set_counts(decision.counts)
        return self._step.report(whole, total_weight, decision.metrics)

    def _gradients_of_copies(self) -> list[CopyGradients]:
        """Returns the gradients of copies of weights, on the backends that store the weights.

        Other replicas have copies, and stages that share a weight with an earlier one.
        """
        stage_plan = self.plan.stage_plan
        found: list[dict[str, list[tf.Tensor]]] = [
            collections.defaultdict(list) for _ in stage_plan.stages
        ]
        for (replica, index), functions in sorted(self._functions.items()):
            backend = self._backends[replica][index]
            for path, total in functions.totals.items():
                owner = stage_plan.owners[path][0] if stage_plan.is_shared(path) else index
                if (replica, index) != (0, owner):
                    sent = backend.send(backend.read(total))
                    found[owner][path].append(self._backends[0][owner].take(sent))
        return [dict(each) for each in found]

    def _statistics(self, by_stage: Sequence[Sums]) -> list[dict[str, Any]]:
        """Returns for every stage the sums for the moving statistics that it stores.

        They include the sums of stages that have copies.
        """
        found: list[dict[str, Any]] = [{} for _ in by_stage]
        for index, sums in enumerate(by_stage):
            for name, pair in sums.statistics.items():
                keeper = self.plan.stage_plan.keeper(name.rpartition(SEPARATOR)[0], index)
                found[keeper] = added_pairs([found[keeper], {name: pair}])
        return found

    # --- evaluation ---

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `ExecutionProgram`."""
        with self._lost_are_named():
            return self._evaluation.step(batch, self._workers, self._name_of)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`; on one device, with the weights of all stages."""
        called, device = self._called(function), self._backends[0][0].device
        with tf.device(device):
            return called(self._evaluation.gathered(device), *inputs)

    def trace(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `ExecutionProgram`; `call` uses the trace."""
        with tf.device(self._backends[0][0].device):
            return traced(self._called(function), self._weight_types(), *inputs)

    def _called(self, function: Callable[..., Any]) -> Any:
        """Returns the tf.function that computes `function` with given weights."""
        if function not in self._calls:

            def run(weights: Flat, *inputs: Any) -> Any:
                return self._step.decoded(function, weights, inputs)

            self._calls[function] = counted_alone(tf.function(run, autograph=False))
        return self._calls[function]


def _shape(batch: Signature) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in sorted(batch.items())
    )


def _reason(error: tf.errors.OpError) -> str:
    """Returns the message for an error outside of the schedule."""
    return f"a step of the pipeline failed: {type(error).__name__}: {line_with_reason(error)}"
