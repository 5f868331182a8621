"""Evaluations during training: those that are due, or that an earlier process did not finish."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.run import evaluation_faults, time_use
from tekso.framework.run.batch_groups import Batches
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.evaluation import Stopped, StoppedError, evaluate_and_score, flat
from tekso.framework.run.label_limits import BatchCheck
from tekso.framework.run.pace import Pace
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report.report import Report
from tekso.framework.run.stop_signals import AgreedStop
from tekso.framework.run.timetable import Timetable
from tekso.framework.task import Scored, Task

Score = Callable[[str, bool, Stopped], Scored | None]
"""Decodes an evaluation input: `score(name, is_last, stopped)`; see `Task.score`."""
Evaluations = dict[str, dict[str, float]]
"""{evaluation: {metric: value}}."""
Save = Callable[[Evaluations], None]
"""Saves the state with the figures of the evaluations so far, and waits until it is written."""


class LoopEvaluations:
    """Evaluates a program during training, and reports the figures.

    Args:
      program: program of the execution.
      task: summarises figures.
      batches: {evaluation: this process's part of the batches of one pass}.
      score: decodes an evaluation input after its pass.
      timetable: intervals of evaluations.
      checkpoints: say whether figures are the best so far.
      pace: measures the speed of training, without evaluations.
      report: reports evaluations.
      group: the processes of the run.
    """

    def __init__(
        self,
        *,
        program: ExecutionProgram,
        task: Task,
        batches: Mapping[str, Batches],
        score: Score,
        timetable: Timetable,
        checkpoints: Checkpoints,
        pace: Pace,
        report: Report,
        group: ProcessGroup,
    ) -> None:
        self._program, self._task = program, task
        self._batches, self._score = batches, score
        self._timetable, self._checkpoints = timetable, checkpoints
        self._pace, self._report, self._group = pace, report, group

    def catch_up(self, step: int, stop: AgreedStop, check: BatchCheck) -> Evaluations:
        """Runs evaluations of the restored step that an earlier process did not finish."""
        if not self._timetable.evaluates(step):
            return {}
        done = self._group.from_first(self._report.evaluated(step))
        return self.run_if_due(step, stop, check, done=done)

    def run_if_due(
        self,
        step: int,
        stop: AgreedStop,
        check: BatchCheck,
        *,
        done: Evaluations | None = None,
        save: Save | None = None,
    ) -> Evaluations:
        """Returns the figures of all evaluations; {} if none is due or a signal was received.

        Args:
          step: steps done.
          stop: receives signals.
          check: checks each batch.
          done: figures that the report already has.
          save: called before an error of an evaluation ends the run; None: nothing is saved.
        """
        done = dict(done or {})
        left = {n: b for n, b in self._batches.items() if n not in done}
        if not self._timetable.evaluates(step) or not left:
            return done
        if stop.poll():
            return {}
        saving = evaluation_faults.saving(
            functools.partial(save, done) if save is not None else None,
            self._checkpoints,
            name=f"step {step}",
        )
        with saving, self._pace.paused(time_use.EVALUATION):
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
                        check=check,
                        stopped=stop.poll,
                        warn=self._report.warn,
                        before_score=functools.partial(
                            self._report.progress, step, f"decoding {name}"
                        ),
                    )
                except StoppedError:
                    return {}
                values, scored = found.figures, found.scored
                done[name] = values
                is_best = self._checkpoints.would_be_best(flat({name: values}))
                seconds = time.perf_counter() - begin
                self._report.evaluation(name, step, values, seconds=seconds, is_best=is_best)
                if scored is not None:
                    self._report.scored(name, step, scored)
            self._report.draw_curves_if_old()
            self._report.progress(step)
        return done
