"""Runs training steps, one or several in a call, and reports those that are compiled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from tekso.framework import task_results, watchdog
from tekso.framework.batch_part import BatchPart, num_examples, num_rows
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.run.batch_groups import Batch, described, shapes
from tekso.framework.run.pace import Pace
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report.report import Report
from tekso.framework.run.step_checks import Figures, StepChecks
from tekso.framework.run.time_use import COMPILE
from tekso.framework.task import Task

AroundSteps = Callable[[int, int], contextlib.AbstractContextManager[None]]
"""Returns the context of a call, given the numbers of its first and its last step (from 1)."""


class StepCalls:
    """Calls a program for training steps.

    Args:
      program: program of the execution.
      task: counts the units of batches.
      checks: takes the figures of every call.
      pace: measures the speed, without the first call of each kind, which is compiled.
      report: shows which calls are compiled.
      group: the processes of the run.
      around: returns the context of every call.
    """

    def __init__(
        self,
        program: ExecutionProgram,
        task: Task,
        checks: StepChecks,
        pace: Pace,
        report: Report,
        group: ProcessGroup,
        around: AroundSteps = lambda first, last: contextlib.nullcontext(),
    ) -> None:
        self._around = around
        self._program, self._task, self._checks = program, task, checks
        self._pace, self._report, self._group = pace, report, group
        self._compiled: set[Any] = set()  # (steps in a call, shapes of its batches)

    @property
    def has_run(self) -> bool:
        """Whether there was a call."""
        return bool(self._compiled)

    @property
    def num_shapes(self) -> int:
        """Number of different shapes of batches so far."""
        return len({shape for _, shape in self._compiled})

    def run(self, batches: list[Batch], step: int) -> list[Figures]:
        """Runs steps in one call; returns the figures of each.

        Args:
          batches: the batch of each step, all of one shape.
          step: steps done before.
        """
        kind = len(batches), shapes(batches[0])
        is_new, is_later = kind not in self._compiled, self.has_run
        self._compiled.add(kind)
        what = described(batches)
        if is_new and is_later:
            self._report.progress(step, f"compiling for {what}")
        begin = time.perf_counter()
        with self._around(step + 1, step + len(batches)):
            found = self._call(batches, step, is_new=is_new)
        self._checks.ran(step + len(batches), found[-1])
        if is_new and is_later:
            self._report.compiled(step + 1, what, seconds=time.perf_counter() - begin)
        return found

    def _call(self, batches: list[Batch], step: int, *, is_new: bool) -> list[Figures]:
        name = f"step {step + len(batches)} of the devices{self._group.others()}"
        if is_new:
            with self._pace.paused(COMPILE), watchdog.waiting(name, factor=watchdog.PREPARING):
                return [*self._program.train_steps(batches, step)]
        with watchdog.waiting(name):
            found: list[Figures] = [*self._program.train_steps(batches, step)]
        for batch in batches:
            self._pace.step(units(self._task, batch)[0])
        return found


def units(task: Task, batch: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the number of units of the global batch, and their name.

    With several processes, the number is estimated from the examples of this process.
    """
    count, unit = task_results.count(task, batch)
    if isinstance(batch, BatchPart):
        count = round(count * num_examples(batch) / num_rows(batch))
    return count, unit
