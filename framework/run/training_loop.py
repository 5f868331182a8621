"""The training loop: restores a checkpoint, then runs steps, evaluations and saves checkpoints.

    restore ─► step ─► report ─► evaluate ─► save ─► step … ─► evaluate ─► save ─► done
                                 └── when due ──┘

An evaluation is reported before the checkpoint of its step is saved, so the log contains everything
that a checkpoint covers. When a run resumes from a checkpoint, later reports are removed. An error
of an evaluation ends the run after the state is saved; the resumed run evaluates what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekso.framework import error_advice, watchdog
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.learning_step import LearnerBase, NonFiniteStepsError
from tekso.framework.run import comparable, rollback, time_use
from tekso.framework.run.batch_groups import Batch, Batches, BatchGroups
from tekso.framework.run.checkpoints import (
    Checkpoint,
    Checkpoints,
    DamagedCheckpointError,
    Description,
)
from tekso.framework.run.early_stopping_rule import EarlyStoppingRule
from tekso.framework.run.evaluation import flat, step_figures
from tekso.framework.run.incidents import Incidents
from tekso.framework.run.label_limits import BatchCheck, LabelLimit
from tekso.framework.run.loop_evaluations import Evaluations, LoopEvaluations, Score
from tekso.framework.run.next_batch import next_batches
from tekso.framework.run.pace import Pace
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report.report import Report
from tekso.framework.run.restore import restore
from tekso.framework.run.skipped_batches import SkippedBatches
from tekso.framework.run.step_calls import AroundSteps, StepCalls, units
from tekso.framework.run.step_checks import StepChecks
from tekso.framework.run.stop_signals import AgreedStop, StopSignals
from tekso.framework.run.timetable import Timetable
from tekso.framework.task import Task

_WARM_UP_STEPS = 5  # of a process: the first steps are traced and compiled


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a training loop.

    Attributes:
      step: steps done.
      first_step: steps that were done before.
      evaluations: figures at `step`, {evaluation: figures}.
      stopped_by: the signal that stopped the loop; None if the run is finished.
      ended_early: why early stopping ended the run before its last step, or "".
      shapes: number of shapes of batches that this process trained on.
      num_not_finite: steps of the run that were not finite, and changed no weight.
    """

    step: int
    first_step: int
    evaluations: Evaluations
    stopped_by: Any = None
    ended_early: str = ""
    shapes: int = 1
    num_not_finite: int = 0


class TrainingLoop:
    """Trains a program: `loop.run(loop.restore(checkpoint))`.

    Args:
      program: program of the execution, neither initialised nor restored.
      task: checks batches, counts their units and summarises figures.
      learner: checks the figures of a step for errors such as non-finite values.
      batches: this process's part of the batches of the training input.
      eval_batches: {evaluation: this process's part of the batches of one pass}.
      timetable: intervals of reports, evaluations and checkpoints.
      early_stopping: ends training when a metric does not improve any more; None: never.
      checkpoints: saves the state.
      description: description of checkpoints; step, metrics and position are filled in.
      report: reports steps and evaluations.
      group: the processes that run this loop together.
      max_rollbacks: how often a run is rolled back because of steps that are not finite.
      incidents: records the first non-finite step of every series; None: in other processes.
      score: decodes an evaluation input after its pass.
      show_step: shows the timeline of the devices in a step; called once, after the warm-up steps.
      around_steps: returns the context of every call; see `StepCalls`.
    """

    def __init__(
        self,
        *,
        program: ExecutionProgram,
        task: Task,
        learner: LearnerBase,
        batches: Batches,
        eval_batches: Mapping[str, Batches],
        timetable: Timetable,
        early_stopping: EarlyStoppingRule | None = None,
        checkpoints: Checkpoints,
        description: Description,
        report: Report,
        group: ProcessGroup | None = None,
        max_rollbacks: int = 0,
        incidents: Incidents | None = None,
        score: Score = lambda name, is_last, stopped: None,
        show_step: Callable[[], None] | None = None,
        around_steps: AroundSteps = lambda first, last: contextlib.nullcontext(),
    ) -> None:
        self._program, self._task = program, task
        self._batches = batches
        self._timetable, self._checkpoints = timetable, checkpoints
        self._early_stopping = early_stopping
        self._description, self._report = description, report
        self._group = group or ProcessGroup()
        self._max_rollbacks = max_rollbacks
        self._checks = StepChecks(learner, program, incidents, self._group)
        self._show_step = show_step
        self._pace = Pace(time_use=report.time_use)
        self._calls = StepCalls(
            program, task, self._checks, self._pace, report, self._group, around_steps
        )
        self._evaluations = LoopEvaluations(
            program=program,
            task=task,
            batches=eval_batches,
            score=score,
            timetable=timetable,
            checkpoints=checkpoints,
            pace=self._pace,
            report=report,
            group=self._group,
        )
        self._step = 0  # steps done
        self._compared_after = -1

    def restore(self, checkpoint: Checkpoint | None) -> int:
        """Restores the state from a checkpoint, or initializes it; returns the steps done.

        If bytes of the checkpoint have changed, it restores the newest one before it that is good.

        Raises:
          CheckpointError: the checkpoint does not fit the program, or all are damaged.
        """
        damage: dict[int, str] = {}
        while checkpoint is not None:
            reasons = self._group.gather(self._restored(checkpoint))
            reason = next(filter(None, reasons), None)
            if reason is None:
                break
            damage[checkpoint.step] = reason
            checkpoint = self._checkpoints.resume(damage)
        if checkpoint is None:
            self._program.initialize()
        else:
            checkpoint.release()  # this run deletes it when it is old
        step = checkpoint.step if checkpoint is not None else 0
        if checkpoint is not None:
            skipped = SkippedBatches.of(checkpoint.description.input)
            input = skipped.described(self._description.input)
            self._compare_since(checkpoint.description.input, input, step)
        self._report.continue_from(step)
        return step

    def _compare_since(self, before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> None:
        """Ignores evaluations on other data than those of this process; see `comparable`."""
        input = comparable.resumed(before, now, step)
        input = comparable.not_before(input, self._compared_after)
        self._description = dataclasses.replace(self._description, input=input)
        self._checkpoints.compare_since(comparable.comparable_since(input))
        if changed := comparable.changed(before, now):
            self._report.warn(comparable.warning(changed, step))

    def compare_after(self, step: int) -> None:
        """Ignores evaluations up to a step, which had another definition of their metrics."""
        self._compared_after = step
        input = comparable.not_before(self._description.input, step)
        self._description = dataclasses.replace(self._description, input=input)
        self._checkpoints.compare_since(step)

    def _restored(self, checkpoint: Checkpoint) -> str | None:
        """Restores a checkpoint; returns the reason if it is damaged."""
        try:
            restore(self._program, checkpoint)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def run(self, first_step: int, label_limits: Sequence[LabelLimit] = ()) -> Outcome:
        """Trains from a restored step to the last step, or until a signal.

        Args:
          first_step: steps done.
          label_limits: the labels to check in each batch.

        Raises:
          CheckpointError: a checkpoint cannot be written.
          ValueError: the task rejects a batch, a label is too large, or the training input ends.
          NonFiniteStepsError: too many steps in a row were not finite, and the run cannot be
            rolled back (again); or no step of the run was finite.
        """
        step, check = first_step, BatchCheck(self._task, label_limits)
        with StopSignals() as signals:
            stop = AgreedStop(signals, self._group)
            while True:
                try:
                    return self._run(step, first_step, stop, check)
                except NonFiniteStepsError as error:
                    step = self._roll_back(error)

    def _run(self, step: int, first_step: int, stop: AgreedStop, check: BatchCheck) -> Outcome:
        begin = self._step = step
        evaluations = self._evaluations.catch_up(step, stop, check)
        metrics: Mapping[str, Any] = {}
        ended_early = self._reason_to_end(step)
        skipped = SkippedBatches.of(self._description.input)
        numbered = skipped.batches(self._batches, step)
        batches = BatchGroups(numbered, self._timetable.steps_per_call)
        self._pace.restart()
        self._report.time_use.switch(time_use.STEP)
        self._report.progress(step, "first step")
        with contextlib.closing(batches):
            while not ended_early and step < self._timetable.steps and not stop.poll():
                is_first = step == begin
                most = 1 if is_first else self._timetable.steps_until_due(step)
                with self._pace.waiting():
                    taken = next_batches(
                        functools.partial(batches.take, most),
                        step,
                        is_first=not self._calls.has_run,
                        save=self._save_for(step, metrics),
                    )
                for i, batch in enumerate(taken, step):
                    check(f"input.batch({skipped.position(i)})", batch)
                names = (f"input.batch({skipped.position(i)})" for i in itertools.count(step))
                with error_advice.naming_ids(dict(zip(names, taken, strict=False))):
                    results = self._calls.run(taken, step)
                self._step = step + len(taken)
                for batch, found in zip(taken, results, strict=True):
                    before, metrics = metrics, found
                    step += 1
                    self._check(step - 1, before)
                    is_last = batch is taken[-1]
                    self._finish_step(step, batch, metrics, is_first=is_first, is_last=is_last)
                    if step == min(first_step + _WARM_UP_STEPS, self._timetable.steps):
                        self._show()
                save = self._save_for(step, metrics)
                evaluations = self._evaluations.run_if_due(step, stop, check, save=save)
                if evaluations:
                    ended_early = self._reason_to_end(step, evaluations)
                if self._is_save_due(step, evaluations):
                    self._check(step, metrics)
                    self._save(step, evaluations)
                self._checkpoints.check()
        self._check(step, metrics)
        self._save(step, evaluations)
        self._checkpoints.wait()
        stop.poll()
        shapes = self._calls.num_shapes
        skips = int(metrics.get("nonfinite_total", 0))
        return Outcome(step, first_step, evaluations, stop.received, ended_early, shapes, skips)

    def _roll_back(self, error: NonFiniteStepsError) -> int:
        """Restores the checkpoint before the last skipped steps; returns its step.

        Raises:
          NonFiniteStepsError: there is none, or the run was rolled back too often.
        """
        first, end = self._checks.series()
        skipped, found = SkippedBatches.of(self._description.input), None
        if skipped.rollbacks < self._max_rollbacks:
            found = rollback.roll_back(
                self._checkpoints, skipped, self._group, first=first, end=end
            )
        if found is None:
            rollback.explain(error, skipped, self._max_rollbacks, self._checks.cause())
            raise error
        step = self.restore(found)
        self._report.warn(rollback.text(SkippedBatches.of(self._description.input), first, step))
        return step

    def _save_for(self, step: int, metrics: Mapping[str, Any]) -> Callable[..., None] | None:
        """Returns what saves the state before an error; None: other processes would have to."""
        if self._group.size > 1 or not self._calls.has_run:
            return None

        def save(evaluations: Evaluations | None = None) -> None:
            self._check(step, metrics)
            self._save(step, evaluations or {})
            self._checkpoints.wait()

        return save

    def _reason_to_end(self, step: int, evaluations: Evaluations | None = None) -> str:
        """Returns why early stopping ends the run after a step before its last one, or "".

        Raises:
          ValueError: no evaluation has reported the metric; the step is saved first.
        """
        rule = self._early_stopping
        if rule is None or step >= self._timetable.steps:
            return ""
        since = comparable.comparable_since(self._description.input)
        history = self._group.from_first(self._report.history(rule.metric, since=since))
        if evaluations and not history:
            self._save(step, evaluations)
            self._checkpoints.wait()
            there = [key for key in flat(evaluations) if not key.endswith("eval_seconds")]
            raise ValueError(
                f"run.early_stopping.metric is {rule.metric.partition('/')[2]!r}, but the "
                f"evaluation reports only {', '.join(there)}. Step {step} is saved: repeat the "
                "command with another --set run.early_stopping.metric"
            )
        return rule.reason(history)

    def _check(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._checks.check(step, metrics, self._description)
        if step >= self._timetable.steps:
            self._checks.check_end(step)

    def _finish_step(
        self,
        step: int,
        batch: Batch,
        metrics: Mapping[str, Any],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Reports a step: the first of a process, or the last of its call, or another one."""
        self._report.progress(step)
        count, unit = units(self._task, batch)
        self._report.count(count, unit)
        if not self._timetable.logs(step):
            if is_first:
                self._pace.restart()  # the first step of a process is traced and compiled
            return
        with watchdog.waiting(f"the figures of step {step}{self._group.others()}"):
            values = step_figures(self._task, metrics)
        reading = self._pace.read() if is_last and not is_first else None
        with self._pace.paused(time_use.OTHER):
            self._report.train(step, values, reading, unit=unit)
        if is_first:
            self._pace.restart()

    def _show(self) -> None:
        if self._show_step is not None:
            with self._pace.paused(time_use.OTHER):
                self._show_step()

    def _is_save_due(self, step: int, evaluations: Evaluations) -> bool:
        if self._timetable.saves(step) or not evaluations:
            return self._timetable.saves(step)
        found: bool = self._group.from_first(self._checkpoints.would_be_best(flat(evaluations)))
        return found

    def save_in(self, checkpoints: Checkpoints) -> int:
        """Saves the state of a loop that an error ended in other checkpoints; returns its step.

        Raises:
          CheckpointError: it cannot be written.
        """
        checkpoints.save(self._program.shards, self._description.at(self._step, {}))
        checkpoints.wait()
        return self._step

    def _save(self, step: int, evaluations: Evaluations) -> None:
        name = f"the state of step {step} and the file system of the checkpoints"
        is_prepared = watchdog.waiting(name, factor=watchdog.PREPARING)
        with self._pace.paused(time_use.CHECKPOINT), is_prepared:
            self._report.sync(step)
            description = self._description.at(step, flat(evaluations))
            self._checkpoints.save(self._program.shards, description)
