"""Saves the state of a run that can no longer write to its logdir, and ends the run.

    the logdir was moved               the checkpoint is written to the moved logdir
    removed, replaced or read-only     a new logdir beside it, or else in the temporary folder

The new logdir has Params, metrics and a checkpoint, so the run can resume there. A full disk is not
a case for this file: the last checkpoint is still in the logdir.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from tekso.framework import files, out_of_memory, out_of_space
from tekso.framework.run.checkpoint_errors import CheckpointError, DiskFullError, WriteError
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.job import Job, checkpoints_of
from tekso.framework.run.label_limits import LabelLimit
from tekso.framework.run.logdir import PARAMS, Logdir, LogdirError, LogdirLostError
from tekso.framework.run.report.report import Report
from tekso.framework.run.training_loop import Outcome, TrainingLoop


def run(
    job: Job,
    loop: TrainingLoop,
    report: Report,
    first_step: int,
    label_limits: Sequence[LabelLimit] = (),
) -> Outcome:
    """Runs a training loop; if it can no longer write to its logdir, saves its state elsewhere.

    Raises:
      LogdirLostError: the logdir was removed or replaced, or cannot be written; the text says where
        the state is saved.
      Exception: as `TrainingLoop.run`.
    """
    try:
        return loop.run(first_step, label_limits)
    except (LogdirLostError, WriteError, OSError) as error:
        if isinstance(error, DiskFullError) or not _is_of_logdir(error, job.logdir):
            raise
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise LogdirLostError(f"{why}; {_save(job, loop, report)}") from error


def _is_of_logdir(error: Exception, logdir: Logdir) -> bool:
    """Whether an error means that the logdir is unusable, not that there is no disk or memory."""
    if not isinstance(error, OSError):
        return True
    is_inside = str(error.filename or "").startswith(logdir.path + "/")
    of_disk = out_of_space.code_of(error) is not None
    return is_inside and not of_disk and out_of_memory.shortage_of(error) is None


def _save(job: Job, loop: TrainingLoop, report: Report) -> str:
    """Saves the state where that is possible; returns a text that says where."""
    if job.cluster is not None:
        return f"start all processes again{job.resumption()}"
    reasons = []
    for path in _places(job.logdir):
        with contextlib.closing(_Place(job, path)) as place:
            try:
                step = place.save(loop, report)
            except (OSError, LogdirError, CheckpointError) as error:
                reasons.append(str(error))
                continue
            where = f"the state of step {step} is saved in {path}"
            return f"{where}: to continue, repeat the command with --logdir={path}"
    return f"its state could not be saved elsewhere: {'; '.join(reasons)}"


def _places(logdir: Logdir) -> Iterator[str]:
    """Yields the folders to try: the logdir where it is now, and new ones."""
    if (place := logdir.place()) is not None:
        yield place
    if files.is_local(logdir.path):
        path = os.path.abspath(logdir.path)
        for above in (os.path.dirname(path), tempfile.gettempdir()):
            yield _unused(files.join(above, f"{os.path.basename(path)}.rescued"))


def _unused(path: str) -> str:
    number, found = 1, path
    while files.exists(found):
        number += 1
        found = f"{path}.{number}"
    return found


class _Place:
    """A logdir for the state of a run: the moved logdir of the run, or a new one."""

    def __init__(self, job: Job, path: str) -> None:
        self._job, self._logdir = job, Logdir(path)
        self._checkpoints = checkpoints_of(
            Checkpoints, job.tree, self._logdir, warn=lambda text: None
        )

    def save(self, loop: TrainingLoop, report: Report) -> int:
        """Writes the files of the run that are not there, and a checkpoint; returns its step."""
        job, place = self._job, self._logdir
        if place.path != job.logdir.place():  # of which this process has the lock
            place.claim(job.model, warn=lambda text: None)  # as for the checkpoints
        if not files.exists(place.file(PARAMS)):
            place.write_params(job.model, job.tree, job.registered)
            place.add_command(job.command)
        if not files.exists(place.metrics):
            files.write_atomically(place.metrics, report.metrics())
        if files.exists(job.logdir.assets) and not files.exists(place.assets):
            files.copy_folder(job.logdir.assets, place.assets)
        self._checkpoints.prepare()
        return loop.save_in(self._checkpoints)

    def close(self) -> None:
        """Releases the new logdir, so that a run can continue there."""
        self._checkpoints.close()
        self._logdir.release()
