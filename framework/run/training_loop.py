"""The training loop: restores a checkpoint, then runs steps, evaluations and saves checkpoints.

    restore ─► step ─► report ─► evaluate ─► save ─► step … ─► evaluate ─► save ─► done
                                 └── when due ──┘

An evaluation is reported before the checkpoint of its step is saved, so the log contains everything
that a checkpoint covers. When a run resumes from a checkpoint, later reports are removed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tekso.framework import task_results
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.learning_step import LearnerBase
from tekso.framework.run.checkpoints import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
    Description,
)
from tekso.framework.run.early_stopping import EarlyStoppingRule
from tekso.framework.run.evaluation import (
    Stopped,
    StoppedError,
    evaluate_and_score,
    step_figures,
)
from tekso.framework.run.pace import Pace
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report.report import Report
from tekso.framework.run.stop_signals import AgreedStop, StopSignals
from tekso.framework.task import Scored, Task

_WARM_UP_STEPS = 5  # of a process: the first steps are traced and compiled

Batch = Mapping[str, np.ndarray]
Batches = Callable[[int], Iterator[Batch]]
"""Returns an iterator over the batches, starting at a step."""
Score = Callable[[str, bool, Stopped], Scored | None]
"""Decodes an evaluation input: `score(name, is_last, stopped)`; see `Task.score`."""
Evaluations = dict[str, dict[str, float]]
"""{evaluation: {metric: value}}."""


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The intervals of reports, evaluations and checkpoints; 0 means only at the end.

    Attributes:
      steps: number of steps of the whole run.
      log_every: steps between two reports.
      eval_every: steps between two evaluations.
      checkpoint_every: steps between two checkpoints.
    """

    steps: int
    log_every: int
    eval_every: int
    checkpoint_every: int

    def logs(self, step: int) -> bool:
        """Whether a step is reported: the first, the last, and every `log_every` steps."""
        return step in (1, self.steps) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether evaluations are due after a step."""
        return step == self.steps or self._is_multiple(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return step == self.steps or self._is_multiple(step, self.checkpoint_every)

    @staticmethod
    def _is_multiple(step: int, every: int) -> bool:
        return bool(every) and step > 0 and step % every == 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a training loop.

    Attributes:
      step: steps done.
      first_step: steps that were done before.
      evaluations: figures at `step`, {evaluation: figures}.
      stopped_by: the signal that stopped the loop; None if the run is finished.
      ended_early: why early stopping ended the run before its last step, or "".
    """

    step: int
    first_step: int
    evaluations: Evaluations
    stopped_by: Any = None
    ended_early: str = ""


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
      score: decodes an evaluation input after its pass.
      show_step: shows the timeline of the devices in a step; called once, after the warm-up steps.
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
        score: Score = lambda name, is_last, stopped: None,
        show_step: Callable[[], None] | None = None,
    ) -> None:
        self._program, self._task, self._learner = program, task, learner
        self._batches, self._eval_batches = batches, eval_batches
        self._timetable, self._checkpoints = timetable, checkpoints
        self._early_stopping = early_stopping
        self._description, self._report = description, report
        self._group = group or ProcessGroup()
        self._score, self._show_step = score, show_step
        self._pace = Pace()
        self._step = 0  # steps done
        self._shapes: set[frozenset[Any]] = set()  # of batches for which the step is compiled

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
        self._report.go_on_from(step)
        return step

    def _restored(self, checkpoint: Checkpoint) -> str | None:
        """Restores a checkpoint; returns the reason if it is damaged."""
        try:
            restore(self._program, checkpoint)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def run(self, first_step: int) -> Outcome:
        """Trains from a restored step to the last step, or until a signal.

        Raises:
          CheckpointError: a checkpoint cannot be written.
          ValueError: the task rejects a batch, or the training input ends.
          NonFiniteStepsError: too many steps in a row were not finite.
        """
        step = self._step = first_step
        with StopSignals() as signals:
            stop = AgreedStop(signals, self._group)
            evaluations = self._catch_up(step, stop)
            metrics: Mapping[str, Any] = {}
            ended_early = self._reason_to_end(step)
            is_done = bool(ended_early) or step >= self._timetable.steps
            batches = iter(()) if is_done else self._batches(step)
            self._pace.restart()
            self._report.progress(step, "first step")
            while not ended_early and step < self._timetable.steps and not stop.poll():
                with self._pace.waiting():
                    batch = next(batches, None)
                if batch is None:
                    raise ValueError(f"the training input ends before step {step}")
                self._task.check_batch(f"input.batch({step})", batch)
                before, metrics = metrics, self._train_step(batch, step)
                step = self._step = step + 1
                self._check(before)
                self._finish_step(step, batch, metrics, is_first=step == first_step + 1)
                if step == min(first_step + _WARM_UP_STEPS, self._timetable.steps):
                    self._show()
                evaluations = self._evaluate_if_due(step, stop)
                if evaluations:
                    ended_early = self._reason_to_end(step, evaluations)
                if self._is_save_due(step, evaluations):
                    self._check(metrics)
                    self._save(step, evaluations)
                self._checkpoints.check()
            close = getattr(batches, "close", None)
            if close is not None:
                close()
            self._check(metrics)
            self._save(step, evaluations)
            self._checkpoints.wait()
            stop.poll()
        return Outcome(step, first_step, evaluations, stop.received, ended_early)

    def _reason_to_end(self, step: int, evaluations: Evaluations | None = None) -> str:
        """Returns why early stopping ends the run after a step before its last one, or "".

        Raises:
          ValueError: no evaluation has reported the metric; the step is saved first.
        """
        rule = self._early_stopping
        if rule is None or step >= self._timetable.steps:
            return ""
        history = self._group.from_first(self._report.history(rule.metric))
        if evaluations and not history:
            self._save(step, evaluations)
            self._checkpoints.wait()
            there = [key for key in _flat(evaluations) if not key.endswith("eval_seconds")]
            raise ValueError(
                f"run.early_stopping.metric is {rule.metric.partition('/')[2]!r}, but the "
                f"evaluation reports only {', '.join(there)}. Step {step} is saved: repeat the "
                "command with another --set run.early_stopping.metric"
            )
        return rule.reason(history)

    def _catch_up(self, step: int, stop: AgreedStop) -> Evaluations:
        """Runs evaluations of the restored step that an earlier process did not finish."""
        if not self._timetable.evaluates(step):
            return {}
        done = self._group.from_first(self._report.evaluated(step))
        return self._evaluate_if_due(step, stop, done=done)

    def _check(self, metrics: Mapping[str, Any]) -> None:
        """Raises an error for bad figures of a step; one step late, so that no step waits."""
        if metrics:
            self._learner.check(metrics)

    def _train_step(self, batch: Batch, step: int) -> Mapping[str, Any]:
        """Runs a step; does not time the first step of a new batch shape, which is compiled."""
        metrics: Mapping[str, Any]
        shapes = frozenset((name, array.shape) for name, array in batch.items())
        if shapes in self._shapes:
            metrics = self._program.train_step(batch, step)
            parts = self._program.part[1]  # of about the same number of units
            self._pace.step(task_results.count(self._task, batch)[0] * parts)
            return metrics
        is_later = bool(self._shapes)
        self._shapes.add(shapes)
        size = " x ".join(map(str, next(iter(batch.values())).shape))
        if is_later:
            self._report.progress(step, f"compiling for batches of {size}")
        begin = time.perf_counter()
        with self._pace.paused():
            metrics = self._program.train_step(batch, step)
        if is_later:
            self._report.compiled(step + 1, size, seconds=time.perf_counter() - begin)
        return metrics

    def _finish_step(
        self, step: int, batch: Batch, metrics: Mapping[str, Any], *, is_first: bool
    ) -> None:
        self._report.progress(step)
        if not self._timetable.logs(step):
            if is_first:
                self._pace.restart()  # the first step of a process is traced and compiled
            return
        values = step_figures(self._task, metrics)
        reading = self._pace.read() if not is_first else None
        with self._pace.paused():
            self._report.train(step, values, reading, unit=task_results.count(self._task, batch)[1])
        if is_first:
            self._pace.restart()

    def _show(self) -> None:
        if self._show_step is not None:
            with self._pace.paused():
                self._show_step()

    def _evaluate_if_due(
        self, step: int, stop: AgreedStop, *, done: Evaluations | None = None
    ) -> Evaluations:
        """Returns the figures of all evaluations; {} if none is due or a signal was received."""
        done = dict(done or {})
        left = {n: b for n, b in self._eval_batches.items() if n not in done}
        if not self._timetable.evaluates(step) or not left:
            return done
        if stop.poll():
            return {}
        with self._pace.paused():
            for name, batches in left.items():
                self._report.progress(step, f"evaluating {name}")
                begin = time.perf_counter()
                try:
                    found = evaluate_and_score(
                        self._program,
                        self._task,
                        batches(0),
                        functools.partial(self._score, name, step == self._timetable.steps),
                        name=name,
                        stopped=stop.poll,
                        before_score=functools.partial(
                            self._report.progress, step, f"decoding {name}"
                        ),
                    )
                except StoppedError:
                    return {}
                values, scored = found.figures, found.scored
                done[name] = values
                is_best = self._checkpoints.would_be_best(_flat({name: values}))
                seconds = time.perf_counter() - begin
                self._report.evaluation(name, step, values, seconds=seconds, is_best=is_best)
                if scored is not None:
                    self._report.scored(name, step, scored)
            self._report.draw_curves_if_old()
            self._report.progress(step)
        return done

    def _is_save_due(self, step: int, evaluations: Evaluations) -> bool:
        if self._timetable.saves(step) or not evaluations:
            return self._timetable.saves(step)
        return self._group.from_first(self._checkpoints.would_be_best(_flat(evaluations)))

    def save_in(self, checkpoints: Checkpoints) -> int:
        """Saves the state of a loop that an error ended in other checkpoints; returns its step.

        Raises:
          CheckpointError: it cannot be written.
        """
        checkpoints.save(self._program.shards, self._description.at(self._step, {}))
        checkpoints.wait()
        return self._step

    def _save(self, step: int, evaluations: Evaluations) -> None:
        with self._pace.paused():
            self._report.sync()
            description = self._description.at(step, _flat(evaluations))
            self._checkpoints.save(self._program.shards, description)


def restore(program: ExecutionProgram, checkpoint: Checkpoint) -> None:
    """Restores the state of a program from a checkpoint.

    All processes run the same operations, also if one of them reads damaged bytes.

    Raises:
      DamagedCheckpointError: bytes that this process read have changed.
      CheckpointError: the checkpoint does not fit the program; names the tensors.
    """
    damage: list[DamagedCheckpointError] = []
    try:
        read = functools.partial(checkpoint.stored, damaged=damage.append)
        program.restore(read, checkpoint.keys)
        if damage:
            raise damage[0]
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path} cannot be restored: {error}. Undo the changes since it was saved, "
            "or train in another --logdir"
        ) from error


def _flat(evaluations: Evaluations) -> dict[str, float]:
    return {
        f"{name}/{metric}": value
        for name, values in evaluations.items()
        for metric, value in values.items()
    }
