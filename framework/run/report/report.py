"""Reports the figures of a run: as console lines, as JSON lines and to TensorBoard."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import files, out_of_memory
from tekso.framework.run import machine_load
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.machine_load import MachineLoad
from tekso.framework.run.metrics_log import (
    MACHINE,
    SECONDS,
    SEEN,
    SPLIT,
    STEP,
    TRAIN,
    MetricsLog,
    Record,
    history,
)
from tekso.framework.run.pace import Reading
from tekso.framework.run.report import curves, lines
from tekso.framework.run.report.console import Console
from tekso.framework.run.report.tensorboard import TensorBoardEvents
from tekso.framework.run.time_use import TimeUse, valid
from tekso.framework.task import Scored

BEFORE_STEPS = "before the first step"
_CURVES_EVERY_S = 20.0
_CHECK_EVERY_S = 1.0
_NO_FIGURES = (SPLIT, STEP, "eval_seconds", "elapsed_seconds", SECONDS, MACHINE)  # of a record


class Report:
    """Reports the steps and evaluations of a training run.

    Args:
      logdir: logdir to which files are written.
      console: shows lines.
      title: title of the run: the key of its experiment.
      steps: number of steps of the whole run.
      time_use: measures what the time is spent on; every record has its seconds.
      load: measures what other programs use of the machine; None: nothing does.
      deciding: "evaluation/metric" of the figures that a line of an evaluation always has.
      declared: metrics that it has before others.

    Attributes:
      phase: when something happens now; see `phase`.
    """

    def __init__(
        self,
        logdir: Logdir,
        console: Console,
        *,
        title: str,
        steps: int,
        time_use: TimeUse | None = None,
        load: MachineLoad | None = None,
        deciding: Collection[str] = (),
        declared: Collection[str] = (),
    ) -> None:
        self.time_use, self._load = time_use or TimeUse(), load
        self._deciding, self._declared = deciding, declared
        self._logdir, self._console = logdir, console
        self._title, self._steps = title, steps
        self._log = MetricsLog(logdir.metrics)
        self._weights = MetricsLog(logdir.file("weights.jsonl"))
        self._marks = MetricsLog(logdir.progress)
        self._events = TensorBoardEvents(logdir.events)
        self.phase = BEFORE_STEPS
        self._seen = 0.0  # units that training has processed, in all processes of the run
        self._unit = ""
        self._begin = time.perf_counter()
        self._drawn = time.perf_counter()  # short runs draw curves only at their end
        self._checked = -_CHECK_EVERY_S

    def continue_from(self, step: int) -> None:
        """Removes what was reported after the step that was restored."""
        self._logdir.check()
        records, marks = self._log.read(), self._marks.read()
        every = [*records, *marks]
        kept = [record for record in every if record[STEP] <= step]
        self.time_use.resume(_most_seconds(kept), _most_seconds(every))
        if self._load is not None:
            self._load.resume(machine_load.longest(record.get(MACHINE) for record in every))
        exact = (_units(mark) for mark in marks if mark[STEP] == step)
        known = next(filter(None, exact), None) or _estimated_units(records, step)
        self._unit, self._seen = known or ("", 0.0)
        self._marks.close()
        self._marks.keep_until(step)
        self._log.close()  # files are replaced; they are opened again by the next report
        self._weights.close()
        self._events.close()
        self._weights.keep_until(step)
        self._log.keep_until(step)
        self._log.open()
        for path in self._events.keep_until(step):
            self._console.line(
                f"removed damaged records from {path}; {self._logdir.metrics} has all figures",
                "warning",
            )

    def evaluated(self, step: int) -> dict[str, dict[str, float]]:
        """Returns the evaluations that were reported at a step, {evaluation: figures}."""
        return {
            record[SPLIT]: {
                k: math.nan if v is None else v  # null in JSON
                for k, v in record.items()
                if k not in _NO_FIGURES
            }
            for record in self._log.read()
            if record[STEP] == step and record[SPLIT] != TRAIN
        }

    def history(self, metric: str, *, since: int = -1) -> list[tuple[int, float | None]]:
        """Returns the step and the value of every evaluation that has a metric, in order.

        Args:
          metric: "evaluation/metric".
          since: only evaluations after this step.
        """
        return history(self._log.read(), metric, since=since)

    def count(self, units: int, unit: str) -> None:
        """Counts the units of a batch that is trained on; `unit` is their name, "tokens"."""
        self._seen += units
        self._unit = unit

    def train(
        self, step: int, values: Mapping[str, float], reading: Reading | None, *, unit: str
    ) -> None:
        """Reports a training step; `reading` is the pace since the previous report, if known."""
        speed: dict[str, float] = {f"{unit}{SEEN}": self._seen}
        if reading is not None:
            speed |= {f"{unit}_per_second": reading.units_per_s, "wait_share": reading.wait_share}
        self._write(step, TRAIN, {**values, **speed})
        left = reading.seconds_per_step * (self._steps - step) if reading is not None else None
        line = lines.train_line(
            step,
            self._steps,
            values,
            speed=reading.units_per_s if reading is not None else None,
            unit=unit,
            wait_share=reading.wait_share if reading is not None else None,
            seconds_left=left if step < self._steps else None,
            width=self._console.width,
        )
        self._console.line(line)
        self.progress(step)

    def compiled(self, step: int, what: str, *, seconds: float) -> None:
        """Reports the first step of a new kind ("batches of 8 x 32"), which was compiled."""
        took = lines.duration(seconds)
        self._console.line(f"step {step} is the first with {what}: {took}", "dim")

    def evaluation(
        self, name: str, step: int, values: Mapping[str, float], *, seconds: float, is_best: bool
    ) -> None:
        """Reports an evaluation."""
        self._write(step, name, {**values, "eval_seconds": seconds})
        line = lines.eval_line(
            name,
            step,
            values,
            seconds=seconds,
            is_best=is_best,
            deciding=lines.names_of(name, self._deciding),
            declared=self._declared,
            width=self._console.width,
        )
        self._console.line(line, "evaluation")

    def scored(self, name: str, step: int, scored: Scored) -> None:
        """Writes the decoded outputs of an evaluation input to the logdir and to TensorBoard."""
        self._logdir.check()
        for note in scored.notes:
            for line in lines.wrapped(f"  {note}", self._console.width):
                self._console.line(line, "dim")
        try:
            self._logdir.write_decoded(name, f"step_{step:09d}", scored.text, scored.images)
            if scored.text:
                self._events.append_text(step, name, "decoded", scored.text)
            for title, picture in scored.images.items():
                self._events.append_image(step, name, title, picture)
        except OSError as error:  # a failed sample must not end a run
            folder = self._logdir.decoded(name)
            self._console.line(f"cannot write {folder}: {error.strerror}", "warning")

    def weights(
        self, step: int, values: Mapping[str, float], layers: Mapping[str, np.ndarray]
    ) -> None:
        """Writes figures of weights to weights.jsonl, and with histograms to TensorBoard.

        Args:
          step: steps done.
          values: {figure: value}.
          layers: {path: the weight of a layer}.
        """
        self._logdir.check()
        self._weights.append({STEP: step, SPLIT: "weights", **values})
        self._events.append(step, "weights", values)
        self._events.append_histograms(step, "weights", layers)

    def _write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        elapsed = time.perf_counter() - self._begin
        times = {"elapsed_seconds": elapsed, SECONDS: self._spent(), **self._machine()}
        self._log.append({STEP: step, SPLIT: split, **values, **times})
        self._logdir.check()
        try:
            self._events.append(step, split, values)
        except OSError:
            self._logdir.check()  # it may have been moved since
            raise

    def warn(self, text: str) -> None:
        """Shows a warning."""
        self._console.line(text, "warning")

    def progress(self, step: int, doing: str = "") -> None:
        """Shows the progress of training, and the current activity if it is not training.

        Raises:
          LogdirLostError: the logdir was removed or replaced; it is checked once a second.
        """
        self.phase = phase(step, doing)
        if time.perf_counter() - self._checked >= _CHECK_EVERY_S:
            self._checked = time.perf_counter()
            self._logdir.check()
        self._console.progress(step, self._steps, doing)

    def draw_curves_if_old(self) -> None:
        """Draws curves.png, unless it was drawn, or the run began, less than 20 seconds ago."""
        if time.perf_counter() - self._drawn >= _CURVES_EVERY_S:
            self.draw_curves()

    def draw_curves(self, *, references: Mapping[str, float] | None = None) -> None:
        """Draws curves.png.

        Args:
          references: bits per byte of other methods for comparison, {name: bits per byte}.
        """
        self._logdir.check()
        try:
            picture = curves.draw(self._log.read(), title=self._title, references=references)
            if picture is not None:
                files.write_atomically(self._logdir.curves, picture)
        except (OSError, MemoryError, ImportError) as error:  # a failed picture must not end a run
            if isinstance(error, ImportError) and out_of_memory.shortage_of(error) is None:
                raise
            reason = getattr(error, "strerror", None) or "out of memory"
            self._console.line(f"cannot write {self._logdir.curves}: {reason}", "warning")
        self._drawn = time.perf_counter()

    def metrics(self) -> bytes:
        """Returns the content of metrics.jsonl, also if the logdir was removed meanwhile."""
        return self._log.content()

    def sync(self, step: int) -> None:
        """Waits until all reported figures are on the disk; to be called before a checkpoint.

        It also writes what a process that resumes from the checkpoint has to know of the time and
        the units so far to progress.jsonl.
        """
        self._mark(step)
        self._log.sync()

    def finish(self, step: int) -> None:
        """Writes to progress.jsonl what the time was spent on until the end of the process."""
        self._logdir.check()
        self._mark(step)

    def _mark(self, step: int) -> None:
        seen = {f"{self._unit}{SEEN}": self._seen} if self._unit else {}
        mark = {STEP: step, SPLIT: TRAIN, **seen, SECONDS: self._spent()}
        self._marks.append({**mark, **self._machine()})

    def _spent(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in self.time_use.seconds().items()}

    def _machine(self) -> dict[str, Any]:
        """Returns what records have of the load of the machine."""
        load = self._load.now() if self._load is not None else None
        if load is None:
            return {}
        return {MACHINE: {k: round(v, 2) for k, v in dataclasses.asdict(load).items()}}

    def close(self) -> None:
        """Closes files and console."""
        self._log.close()
        self._weights.close()
        self._marks.close()
        self._events.close()
        self._console.close()


def phase(step: int, doing: str = "") -> str:
    """Returns when something happens, for messages: "after step 3 (evaluating dev)"."""
    return f"after step {step}" + (f" ({doing})" if doing else "")


def _most_seconds(records: Sequence[Record]) -> Mapping[str, float]:
    """Returns the largest seconds of a record; {} if none has them."""
    found = [valid(one) for r in records if isinstance(one := r.get(SECONDS), dict)]
    return max(found, key=lambda one: sum(one.values()), default={})


def _units(record: Record) -> tuple[str, float] | None:
    """Returns the name of the units in a record, and how many training had processed.

    Runs of earlier versions have marks without the name.
    """
    for name, value in record.items():
        if name.endswith(SEEN) and isinstance(value, int | float):
            return name.removesuffix(SEEN), float(value)
    return None


def _estimated_units(records: Sequence[Record], step: int) -> tuple[str, float] | None:
    """Returns about the units that training had processed at a step without a mark.

    The steps since its last record count as much as those before, on average.
    """
    for record in reversed(records):
        if 0 < record[STEP] <= step and (found := _units(record)):
            unit, seen = found
            return unit, seen * step / record[STEP]
    return None
