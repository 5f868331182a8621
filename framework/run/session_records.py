"""What a session records of its steps and evaluations, so that `save` writes a run with its past.

A run of the trainer that resumes from the saved folder continues the units and the time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tekso.framework import files, task_results
from tekso.framework.json_text import to_json
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metrics_log import SECONDS, SEEN, SPLIT, STEP, TRAIN
from tekso.framework.run.time_use import ACTIVITIES, COMPILE, OTHER, START
from tekso.framework.run.time_use import STEP as TRAINING_STEP
from tekso.framework.task import Task


class _Entry(NamedTuple):
    """A record, without a dict of its own: a long session has one for each step."""

    step: int
    split: str
    names: tuple[str, ...]  # one object for all records with these names
    values: tuple[float, ...]
    seconds: tuple[float, ...]  # of `ACTIVITIES`


class SessionRecords:
    """The records of a session, as in metrics.jsonl.

    Time between the calls of a session, in which a notebook waits, does not count.

    Args:
      task: counts the units of batches.
      begin: when the session began, by the clock.
      clock: returns seconds.
    """

    def __init__(
        self, task: Task, *, begin: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._task, self._clock = task, clock
        self._entries: list[_Entry | None] = []  # None: an evaluation that was replaced
        self._evaluations: dict[tuple[int, str], int] = {}  # {(step, name): its entry}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._seconds[START] = clock() - begin
        self._seen, self._unit = 0, ""
        self._shapes: set[tuple[Any, ...]] = set()

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Attributes the time of a block to an activity."""
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[activity] += self._clock() - begin

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """Attributes the time of a block that no activity in it gets to "other"."""
        begin, before = self._clock(), math.fsum(self._seconds.values())
        try:
            yield
        finally:
            known = math.fsum(self._seconds.values()) - before
            self._seconds[OTHER] += max(0.0, self._clock() - begin - known)

    @contextlib.contextmanager
    def stepping(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Attributes the time of a step, which is compiled for batches of a new shape."""
        shapes = tuple(sorted((name, np.shape(value)) for name, value in batch.items()))
        activity = TRAINING_STEP if shapes in self._shapes else COMPILE
        self._shapes.add(shapes)
        with self.during(activity):
            yield

    def step(self, step: int, batch: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Records a training step."""
        count, self._unit = task_results.count(self._task, batch)
        self._seen += count
        self._add(step, TRAIN, {**figures, **self._units()})

    def evaluation(self, step: int, name: str, figures: Mapping[str, float]) -> None:
        """Records a whole evaluation; it replaces an earlier one of the same step."""
        if (earlier := self._evaluations.get((step, name))) is not None:
            self._entries[earlier] = None
        self._evaluations[step, name] = len(self._entries)
        self._add(step, name, figures)

    def write(self, logdir: Logdir, step: int) -> None:
        """Writes metrics.jsonl, and progress.jsonl, from which a run resumes time and units."""
        spent = _spent(tuple(self._seconds.values()))
        mark = {STEP: step, SPLIT: TRAIN, **self._units(), SECONDS: spent}
        records = (_record(entry) for entry in self._entries if entry is not None)
        for path, found in ((logdir.metrics, records), (logdir.progress, [mark])):
            text = "".join(f"{to_json(record)}\n" for record in found)
            files.write_atomically(path, text)

    def _add(self, step: int, split: str, figures: Mapping[str, float]) -> None:
        names = tuple(figures)
        names = self._names.setdefault(names, names)
        seconds = tuple(self._seconds.values())
        self._entries.append(_Entry(step, split, names, tuple(figures.values()), seconds))

    def _units(self) -> dict[str, int]:
        return {f"{self._unit}{SEEN}": self._seen} if self._unit else {}


def _record(entry: _Entry) -> dict[str, Any]:
    spent = _spent(entry.seconds)
    times = {"elapsed_seconds": math.fsum(spent.values()), SECONDS: spent}
    figures = zip(entry.names, entry.values, strict=True)
    return {STEP: entry.step, SPLIT: entry.split, **dict(figures), **times}


def _spent(seconds: tuple[float, ...]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in zip(ACTIVITIES, seconds, strict=True)}
