"""Checkpoints of a run: written in the background, verified when read, the last and the best kept.

    checkpoints = Checkpoints("run/checkpoints", keep_last=2, metric="dev/loss")
    checkpoints.save(program.state, Description(step=100, model=…, params=…))  # returns at once
    checkpoints.wait()  # on the disk now
    good = checkpoints.newest_good()  # a Checkpoint, or None if there is none yet

A checkpoint that turns out damaged is named and passed over; it is never deleted.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from absl import logging

from tekso.framework import files
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    DamagedCheckpointError,
    Description,
    DiskFullError,
)

__all__ = [
    "Checkpoint", "CheckpointError", "Checkpoints", "DamagedCheckpointError", "Description",
    "DiskFullError",
]  # fmt: skip

_STEP = "step_"
_LEAVING = ".deleted_"


class Checkpoints:
    """The checkpoints of a run, a directory each. One process writes, any number read.

    Args:
      directory: where they lie.
      keep_last: number of newest ones that are kept.
      keep_best: number of best ones that are kept besides; 0: none.
      metric: "evaluation/metric" that says which is best.
      goal: which end of the metric is good.
      warn: takes the text of a warning.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep_last: int = 3,
        keep_best: int = 0,
        metric: str = "",
        goal: Literal["min", "max"] = "min",
        warn: Callable[[str], None] = logging.warning,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last is {keep_last} and keep_best {keep_best}, want at least 1 and 0"
            )
        self.directory = directory
        self._keep_last, self._keep_best = keep_last, keep_best
        self._metric, self._goal, self._has_warned = metric, goal, False
        self._warn = warn
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._values: dict[int, float] = {}  # metric of the checkpoints that are kept, by step
        self._saved: int | None = None

    # --- writing ---

    def prepare(self) -> None:
        """Makes the directory ready for writing: removes what an ended process left unfinished."""
        files.make_folder(self.directory)
        for name in files.names(self.directory):
            if name.startswith((checkpoint_files.UNFINISHED, _LEAVING)):
                files.remove_folder(self._path(name))
        self._values = self._read_values()

    def save(self, state: Callable[[], Mapping[str, np.ndarray]], description: Description) -> None:
        """Starts writing a checkpoint and returns; waits first until the one before is written.

        Does nothing if this step is the one that was saved or read last.

        Args:
          state: returns arrays by key, which nobody changes any more; called before this returns.
          description: step, model, params, metrics and input; the rest is filled in.

        Raises:
          CheckpointError: the one before could not be written (DiskFullError: for lack of room).
        """
        self.wait()
        if self._saved == description.step:
            return
        self._saved = description.step
        value = self._value(description.metrics)
        if value is not None:
            self._values[description.step] = value
        self._pending = self._writer.submit(self._write, dict(state()), description)

    def check(self) -> None:
        """Raises the error of a write that has failed, without waiting for one that goes on."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the write that goes on, and raises its error if it failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.result()
            except BaseException:
                self._values.pop(self._saved or 0, None)
                self._saved = None
                raise

    def close(self) -> None:
        """Waits for the write that goes on, whatever comes of it. Nothing can be saved any more."""
        self._writer.shutdown(wait=True)

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be among the best that are kept."""
        value = self._value(metrics)
        if value is None or not self._keep_best:
            self._warn_of_no_metric(metrics)
            return False
        kept = sorted(map(self._rank, list(self._values.values())))[: self._keep_best]
        return len(kept) < self._keep_best or self._rank(value) < kept[-1]

    def _warn_of_no_metric(self, metrics: Mapping[str, float]) -> None:
        """Says once that an evaluation has no figure by which the best could be known."""
        name = self._metric.partition("/")[0]
        there = [key.partition("/")[2] for key in metrics if key.startswith(f"{name}/")]
        if there and self._keep_best and self._metric not in metrics and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"no best checkpoint is kept: {self._metric} (run.keep_best.metric) is not "
                f"reported, only {', '.join(there)}"
            )

    def _write(self, tensors: Mapping[str, np.ndarray], description: Description) -> None:
        path = self.path(description.step)
        if files.exists(path):
            aside = self._set_aside(path, "earlier")
            self._warn(f"{path} was there already: it was renamed to {aside}")
        checkpoint_files.write(path, tensors, description)
        self._remove_surplus()

    def _remove_surplus(self) -> None:
        steps = self.steps()
        ranked = sorted(
            (step for step in steps if step in self._values),
            key=lambda step: (self._rank(self._values[step]), step),
        )
        kept = {*steps[-self._keep_last :], *ranked[: self._keep_best]}
        for step in steps:
            if step in kept:
                continue
            path = self.path(step)
            if files.is_local(path):  # so that it is never seen half deleted
                leaving = self._path(_LEAVING + _name(step))
                files.rename(path, leaving)
                path = leaving
            else:
                files.remove(files.join(path, checkpoint_files.DESCRIPTION))
            files.remove_folder(path)
            self._values.pop(step, None)

    def _read_values(self) -> dict[int, float]:
        values = {}
        for step in self.steps() if self._metric else ():
            try:
                metrics = checkpoint_files.describe(self.path(step)).metrics
            except DamagedCheckpointError:
                continue  # told when it is opened
            value = self._value(metrics)
            if value is not None:
                values[step] = value
        return values

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        value = metrics.get(self._metric)
        return value if value is not None and math.isfinite(value) else None

    def _rank(self, value: float) -> float:
        return value if self._goal == "min" else -value

    # --- reading ---

    def path(self, step: int) -> str:
        """Returns where the checkpoint of a step lies."""
        return self._path(_name(step))

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint that is kept; None if none has the metric."""
        kept = sorted((self._rank(v), step) for step, v in list(self._values.items()))
        return kept[0][1] if kept else None

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, good or damaged, the oldest first."""
        if not files.exists(self.directory):
            return []
        names = files.names(self.directory)
        numbers = [name.removeprefix(_STEP) for name in names if name.startswith(_STEP)]
        return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())

    def newest_good(self, *, set_aside: bool = False) -> Checkpoint | None:
        """Opens the newest checkpoint that is whole; warns of every damaged one.

        Args:
          set_aside: rename the damaged ones to "damaged_step_…", so that their names are free.

        Raises:
          CheckpointError: there are checkpoints, and all are damaged.
        """
        damaged: dict[str, str] = {}
        good = None
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                good = self._open(path)
                self._saved = step
                break
            except DamagedCheckpointError as error:
                damaged[path] = str(error)
        if good is None and any(map(_is_sealed, damaged)):
            told = "; ".join(f"{path}: {reason}" for path, reason in damaged.items())
            raise CheckpointError(
                f"no good checkpoint is left in {self.directory} ({told}). Nothing was deleted. To "
                "train from the beginning, give another --logdir or move this one away"
            )
        for path, reason in damaged.items():
            aside = f"; renamed to {self._set_aside(path, 'damaged')}" if set_aside else ""
            self._warn(f"passed over the damaged checkpoint {path}: {reason}{aside}")
        return good

    def open(self, path: str) -> Checkpoint:
        """Opens the checkpoint at a path, or of a step of this run ("100", "step_00000100").

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        number = path.removeprefix(_STEP)
        if number.isascii() and number.isdigit():
            path = self.path(int(number))
        path = path.rstrip("/")
        if not files.exists(path):
            there = ", ".join(_name(step) for step in self.steps()) or "none"
            raise CheckpointError(
                f"there is no checkpoint {path}; in {self.directory} there are: {there}"
            )
        try:
            return checkpoint_files.open_verified(path)
        except DamagedCheckpointError as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error

    def best(self, metric: str, goal: Literal["min", "max"]) -> Checkpoint:
        """Opens the best one of those that are kept.

        Args:
          metric: "evaluation/metric" that decides.
          goal: which end of it is good.

        Raises:
          CheckpointError: none has the metric, or the best is damaged.
        """
        self._metric, self._goal = metric, goal
        self._values = self._read_values()
        step = self.best_step()
        if step is None:
            there = ", ".join(map(_name, self.steps())) or "none"
            raise CheckpointError(
                f"no checkpoint in {self.directory} was evaluated by {metric or 'any metric'} "
                f"(run.keep_best), so none is the best; there are: {there}"
            )
        return self.open(self.path(step))

    def _open(self, path: str) -> Checkpoint:
        checkpoint = checkpoint_files.open_verified(path)
        if _name(checkpoint.step) != os.path.basename(path):
            raise DamagedCheckpointError(f"it says that it is of step {checkpoint.step}")
        return checkpoint

    def _set_aside(self, path: str, why: str) -> str:
        number, name = 1, f"{why}_{os.path.basename(path)}"
        while files.exists(aside := self._path(f"{name}.{number}")):
            number += 1
        files.rename(path, aside)
        return aside

    def _path(self, name: str) -> str:
        return files.join(self.directory, name)


def _name(step: int) -> str:
    return f"{_STEP}{step:08d}"


def _is_sealed(path: str) -> bool:
    """False for what was cut off on a file system without renames: it never was a checkpoint."""
    description = files.join(path, checkpoint_files.DESCRIPTION)
    return files.is_local(path) or files.exists(description)
