"""Manages the checkpoints of a run: writes in the background, verifies, keeps the last and best.

    checkpoints = Checkpoints("run/checkpoints", keep_last=2, metric="dev/loss")
    checkpoints.save(program.shards, Description(step=100, model=…, params=…))
    checkpoints.wait()  # now it is on the disk
    good = checkpoints.newest_good()  # a Checkpoint, or None if there is none yet

A save takes references to the tensors of the state and returns. A thread writes them, piece by
piece, while training continues. A training step waits before it replaces more tensors that are not
yet written than fit into `buffer_bytes`; see `gate`.

A damaged checkpoint is skipped with a warning; it is never deleted.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from absl import logging

from tekso.framework import files, watchdog
from tekso.framework.execution.shards import Shard
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoint_errors import DeletedCheckpointError
from tekso.framework.run.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    DamagedCheckpointError,
    Description,
    DiskFullError,
)
from tekso.framework.run.lease import unused
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.ranking import Ranking
from tekso.framework.run.tensor_files import Piece
from tekso.framework.run.unwritten import Unwritten, grouped

__all__ = [
    "Checkpoint", "CheckpointError", "Checkpoints", "DamagedCheckpointError", "Description",
    "DiskFullError",
]  # fmt: skip

BUFFER_BYTES = 1 << 26
_STEP = "step_"
_LEAVING = ".deleted_"
Goal = Literal["min", "max"]


class Checkpoints:
    """The checkpoints of a run, one directory each.

    Every process of the run writes its own shards. Only process 0 creates, renames and deletes
    checkpoints; for the others see `FollowingCheckpoints`.

    Args:
      directory: directory of all checkpoints.
      keep_last: number of newest checkpoints to keep.
      keep_best: number of best checkpoints to keep in addition; 0: none.
      metric: "evaluation/metric" by which the best are chosen.
      goal: whether the smallest or the largest value of the metric is best.
      warn: called with the text of a warning.
      group: the processes of the run.
      check: called before anything is written or deleted; raises an error if it must not be.
      buffer_bytes: memory for values that a training step has replaced before they were written.

    Attributes:
      gate: closed while more than `buffer_bytes` wait to be written. Steps should wait for it; if
        they do not, the values that wait stay the same and take memory.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep_last: int = 3,
        keep_best: int = 0,
        metric: str = "",
        goal: Goal = "min",
        warn: Callable[[str], None] = logging.warning,
        group: ProcessGroup | None = None,
        check: Callable[[], None] = lambda: None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last is {keep_last} and keep_best {keep_best}, expected at least 1 and 0"
            )
        self.directory, self.buffer_bytes = directory, buffer_bytes
        self.gate = UpdateGate(f"the file system to write a checkpoint in {directory}")
        self._keep_last = keep_last
        self._ranking = Ranking(metric, goal, count=keep_best, warn=warn)
        self._warn, self._group, self._check = warn, group or ProcessGroup(), check
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._saved: int | None = None

    # --- writing ---

    def prepare(self) -> None:
        """Prepares the directory for writing; removes incomplete files of earlier processes."""
        files.make_folder(self.directory)
        for name in files.names(self.directory):
            if name.startswith((checkpoint_files.UNFINISHED, _LEAVING)):
                files.remove_folder(self._path(name))
        self._ranking.read(self._paths())

    def save(self, shards: Callable[[], Iterable[Shard]], description: Description) -> None:
        """Waits until the previous checkpoint is written, then begins to write one.

        All processes must call it. Does nothing if the checkpoint of this step was the last one
        saved or read.

        Args:
          shards: returns the pieces of the state that this process stores, with their values.
          description: step, model, params, metrics and input; the rest is filled in.

        Raises:
          CheckpointError: the previous checkpoint could not be written (DiskFullError: not enough
            disk space).
        """
        self.wait()
        if self._saved == description.step:
            return
        self._saved = description.step
        self._ranking.add(description.step, description.metrics)
        parts = Unwritten(grouped(shards()), most_bytes=self.buffer_bytes, gate=self.gate)
        # Without memory for the thread, which the first call starts, Python waits for ever.
        with watchdog.waiting("the start of the thread that writes checkpoints"):
            self._pending = self._writer.submit(self._write_and_close, parts, description)

    def check(self) -> None:
        """Raises the error of a failed write, without waiting for a write in progress."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for a write in progress, and raises its error if it failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            name = f"the file system to write a checkpoint in {self.directory}"
            try:
                with watchdog.waiting(name, factor=watchdog.PREPARING):
                    pending.result()
            except BaseException:
                self._ranking.remove(self._saved or 0)
                self._saved = None
                raise

    def close(self) -> None:
        """Waits for a write in progress and ignores its errors. Nothing can be saved afterwards."""
        self._writer.shutdown(wait=True)

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be one of the best that are kept."""
        return self._ranking.would_be_best(metrics)

    def compare_since(self, step: int) -> None:
        """Ranks only checkpoints after a step; see `comparable`."""
        self._ranking.forget_until(step)

    def _write_and_close(self, parts: Unwritten, description: Description) -> None:
        try:
            self._write(parts, description, parts.size_bytes)
        finally:
            parts.close()

    def _write(
        self, parts: Iterable[Sequence[Piece]], description: Description, size_bytes: int
    ) -> None:
        self._check()
        path = self.path(description.step)
        if files.exists(path):
            aside = self._set_aside(path, "earlier")
            self._warn(f"{path} already existed and was renamed to {aside}")
        checkpoint_files.write_shards(
            path,
            parts,
            description,
            size_bytes=size_bytes,
            group=self._group,
            check=self._check,
        )
        self._remove_surplus()

    def _remove_surplus(self) -> None:
        self._check()
        steps = self.steps()
        kept = {*steps[-self._keep_last :], *self._ranking.to_keep(steps)}
        for step in steps:
            if step not in kept:
                with unused(self.path(step)) as is_unused:
                    if is_unused:  # otherwise it is deleted after a later save
                        self._remove(step)

    def _remove(self, step: int) -> None:
        path = self.path(step)
        if files.is_local(path):  # so that no reader sees a partly deleted checkpoint
            leaving = self._path(_LEAVING + _name(step))
            files.rename(path, leaving)
            path = leaving
        else:
            files.remove(files.join(path, checkpoint_files.DESCRIPTION))
        files.remove_folder(path)
        self._ranking.remove(step)

    # --- reading ---

    def path(self, step: int) -> str:
        """Returns the directory of the checkpoint of a step."""
        return self._path(_name(step))

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint that is kept; None if none has the metric."""
        return self._ranking.best()

    def earlier_best(self) -> list[int]:
        """Returns the steps of those that stay because they were best by an earlier metric."""
        self._ranking.read(self._paths())
        return self._ranking.earlier_best()

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, including damaged ones, in ascending order."""
        if not files.exists(self.directory):
            return []
        names = files.names(self.directory)
        numbers = [name.removeprefix(_STEP) for name in names if name.startswith(_STEP)]
        return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())

    def resume(self, known_damage: Mapping[int, str] | None = None) -> Checkpoint | None:
        """Opens the newest checkpoint in all processes of the run; None if there is none.

        It verifies the sizes of the files. Their bytes are verified when a process reads them; if
        they have changed, call this again with the steps of all checkpoints that were damaged.

        Args:
          known_damage: {step: reason} of checkpoints that cannot be read; they are set aside.

        Raises:
          CheckpointError: all checkpoints are damaged.
        """
        good = self.newest_good(set_aside=True, unread=True, known_damage=known_damage)
        self._group.from_first(good.step if good else None)
        return good

    def newest_good(
        self,
        *,
        set_aside: bool = False,
        unread: bool = False,
        known_damage: Mapping[int, str] | None = None,
    ) -> Checkpoint | None:
        """Opens the newest undamaged checkpoint; warns of every damaged one that it skips.

        Args:
          set_aside: rename damaged checkpoints to "damaged_step_…", so that their names are free.
          unread: verify the bytes of tensors when they are read, instead of now.
          known_damage: {step: reason} of checkpoints to skip.

        Raises:
          CheckpointError: all checkpoints are damaged.
        """
        damaged: dict[str, str] = {}
        good = None
        for step, found in self._newest_first(unread=unread, known_damage=known_damage or {}):
            if isinstance(found, Checkpoint):
                good, self._saved = found, step
                break
            damaged[self.path(step)] = str(found)
        if good is None and any(map(_is_sealed, damaged)):
            listed = "; ".join(f"{path}: {reason}" for path, reason in damaged.items())
            raise DamagedCheckpointError(
                f"all checkpoints in {self.directory} are damaged ({listed}). Nothing was deleted. "
                "To train from the beginning, give another --logdir or move this folder away"
            )
        for path, reason in damaged.items():
            aside = f"; renamed to {self._set_aside(path, 'damaged')}" if set_aside else ""
            self._warn(f"skipped the damaged checkpoint {path}: {reason}{aside}")
        return good

    def last(self, count: int) -> list[Checkpoint]:
        """Opens up to `count` of the newest undamaged checkpoints; warns of damaged ones."""
        good: list[Checkpoint] = []
        for step, found in self._newest_first():
            if isinstance(found, Checkpoint):
                good.append(found)
            else:
                self._warn(f"skipped: checkpoint {self.path(step)} is damaged: {found}")
            if len(good) == count:
                break
        return good

    def _newest_first(
        self, *, unread: bool = False, known_damage: Mapping[int, str] = {}
    ) -> Iterator[tuple[int, Checkpoint | DamagedCheckpointError]]:
        """Opens the checkpoints, beginning with the newest.

        If training deletes one meanwhile, it has written newer ones, so the folder is read again
        before each.
        """
        open_path = checkpoint_files.open_unread if unread else checkpoint_files.open_verified
        tried: set[int] = set()
        while left := [step for step in self.steps() if step not in tried]:
            tried.add(step := left[-1])
            try:
                if step in known_damage:
                    raise DamagedCheckpointError(known_damage[step])
                found = open_path(self.path(step))
                if found.step != step:
                    raise DamagedCheckpointError(f"its description is for step {found.step}")
                yield step, found
            except DamagedCheckpointError as error:
                yield step, error
            except DeletedCheckpointError:
                continue

    def open(self, path: str, *, unread: bool = False) -> Checkpoint:
        """Opens a checkpoint by its path, or by its step in this run ("100", "step_00000100").

        Args:
          path: the path or the step.
          unread: verify the bytes of tensors when they are read, instead of now.

        Raises:
          CheckpointError: it does not exist, or is damaged; a DeletedCheckpointError if a run in
            progress deletes it meanwhile.
        """
        number = path.removeprefix(_STEP)
        if number.isascii() and number.isdigit():
            path = self.path(int(number))
        path = path.rstrip("/")
        if not files.exists(path):
            there = ", ".join(_name(step) for step in self.steps()) or "none"
            raise CheckpointError(
                f"there is no checkpoint {path}; checkpoints in {self.directory}: {there}"
            )
        return self._open(path, unread=unread)

    @staticmethod
    def _open(path: str, *, unread: bool = False) -> Checkpoint:
        open_path = checkpoint_files.open_unread if unread else checkpoint_files.open_verified
        try:
            return open_path(path)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error}") from error

    def best(self, metric: str, goal: Goal, *, unread: bool = False) -> Checkpoint:
        """Opens the best checkpoint.

        Args:
          metric: "evaluation/metric" by which the best is chosen.
          goal: whether the smallest or the largest value of the metric is best.
          unread: as in `open`.

        Raises:
          CheckpointError: no checkpoint has the metric, or the best one is damaged.
        """
        ranking, deleted = Ranking(metric, goal), None
        ranking.read(self._paths())
        while (step := ranking.best()) not in (None, deleted):
            try:
                return self._open(self.path(step or 0), unread=unread)
            except DeletedCheckpointError:  # training has found a better one
                deleted = step
                ranking.read(self._paths())
        there = ", ".join(map(_name, self.steps())) or "none"
        raise CheckpointError(f"{self.directory}: {ranking.why_no_best()}; checkpoints: {there}")

    def _set_aside(self, path: str, why: str) -> str:
        number, name = 1, f"{why}_{os.path.basename(path)}"
        while files.exists(aside := self._path(f"{name}.{number}")):
            number += 1
        files.rename(path, aside)
        return aside

    def _paths(self) -> dict[int, str]:
        return {step: self.path(step) for step in self.steps()}

    def _path(self, name: str) -> str:
        return files.join(self.directory, name)


def _name(step: int) -> str:
    return f"{_STEP}{step:08d}"


def _is_sealed(path: str) -> bool:
    """Whether the checkpoint was completed; without renames, incomplete ones may remain."""
    description = files.join(path, checkpoint_files.DESCRIPTION)
    return files.is_local(path) or files.exists(description)
