"""Opens a run on disk: one of its checkpoints, the folder of the run, its Params and its task.

run = open_run("runs/ende")                               # the newest good checkpoint
run = open_run("runs/ende", "best")                       # the best one, or one by step or path
run = open_run("runs/ende/best")                          # the same in a single path
run = open_run("runs/ende/checkpoints/step_00002000")     # any checkpoint, also an average
run.checkpoint, run.logdir, run.tree(), run.task()
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from absl import logging

from tekso.framework import files, foreign_variables
from tekso.framework.params import Params, references
from tekso.framework.run import checkpoint_files, inspection, missing_run, stored_sizes
from tekso.framework.run.checkpoint_paths import BEST, LAST, split
from tekso.framework.run.checkpoints import Checkpoint, CheckpointError, Checkpoints, Description
from tekso.framework.run.logdir import PARAMS, Logdir
from tekso.framework.run.metric_choice import goal_of, metric_of


@dataclasses.dataclass(frozen=True)
class OpenedRun:
    """A checkpoint and the run it belongs to.

    Attributes:
      checkpoint: the weights and the description of the checkpoint.
      logdir: the folder of the run, with its assets.
    """

    checkpoint: Checkpoint
    logdir: Logdir

    @property
    def model(self) -> str:
        """Key of the experiment that wrote the checkpoint."""
        return self.checkpoint.description.model

    def tree(self) -> Any:
        """Returns the Params of the experiment that wrote the checkpoint.

        Raises:
          CheckpointError: they can no longer be read.
        """
        return self._params(self.checkpoint.description.params)

    def completed_tree(self) -> Any:
        """Returns `tree()`, with open sizes of the task filled in.

        They stay open if an earlier version wrote the checkpoint, which then lacks these sizes.

        Raises:
          CheckpointError: as in `tree`.
        """
        return completed_tree(self.checkpoint.description, self.checkpoint.path)

    def task(self) -> Any:
        """Returns the task, built without the data of the run.

        Raises:
          CheckpointError: as in `tree`.
          ValueError: an earlier version wrote the checkpoint, and the task needs a size that only
            the data determines.
        """
        if not self.checkpoint.description.task:
            return inspection.task_of(self.tree(), assets_dir=self.logdir.assets)
        task = self._params(self.checkpoint.description.task).instantiate()
        foreign_variables.check(task)
        return task

    def _params(self, text: str) -> Any:
        return _params_of(text, self.checkpoint.path)


def completed_tree(description: Description, path: str) -> Any:
    """Returns the Params of an experiment from the description of a checkpoint; see `OpenedRun`.

    Args:
      description: of the checkpoint, or of a file that was exported from it.
      path: of the checkpoint or file, for errors.

    Raises:
      CheckpointError: the Params can no longer be read.
    """
    tree = _params_of(description.params, path)
    if description.task:
        stored_sizes.fill(tree.task, _params_of(description.task, path))
    return tree


def _params_of(text: str, path: str) -> Any:
    try:
        return Params.from_text(text)
    except (ValueError, ImportError) as error:
        if advice := references.import_advice(error):
            raise CheckpointError(f"the Params of {path}: {advice}") from error
        raise CheckpointError(
            f"the Params of {path} cannot be read: {error}. If a package of yours or a notebook "
            "cell defines these classes, import or run it first; for a command, add "
            "--import=your.package"
        ) from error


def open_run(
    path: str,
    which: str | None = None,
    *,
    warn: Callable[[str], None] = logging.warning,
    unread: bool = False,
) -> OpenedRun:
    """Opens a checkpoint, given its own folder or the folder of its run.

    Args:
      path: folder of a run, or of a checkpoint, or "RUN/last", "RUN/best" or "RUN/STEP". The run
        of a checkpoint is the nearest parent folder with a `params.txt`.
      which: the checkpoint of the run: a step, a path, "best" or "last"; None: the newest good one.
      warn: called with the text of a warning.
      unread: verify the bytes of tensors when they are read, instead of now.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise CheckpointError(
            f"a run is the path of its folder, or of one of its checkpoints, given {path!r}"
        )
    path, name = split(path)
    which = which or name
    if which is None and files.exists(files.join(path, checkpoint_files.DESCRIPTION)):
        found = Checkpoints(os.path.dirname(path), warn=warn).open(path, unread=unread)
        return OpenedRun(found, _logdir_of(path))
    logdir = Logdir(path)
    checkpoints = Checkpoints(logdir.checkpoints, warn=warn)
    if which not in (None, BEST, LAST):
        other, name = split(which or "")
        if name:
            return OpenedRun(open_run(other, name, warn=warn, unread=unread).checkpoint, logdir)
        return OpenedRun(checkpoints.open(other, unread=unread), logdir)
    newest = checkpoints.newest_good(unread=unread)
    if newest is None:
        if why := missing_run.not_a_folder(path):
            raise CheckpointError(why)
        advice = "give the folder of a run that saved a checkpoint, or the folder of a checkpoint"
        raise CheckpointError(
            f"there is no checkpoint in {logdir.checkpoints}: {missing_run.reason(path) or advice}"
        )
    run = OpenedRun(newest, logdir)
    if which != BEST:
        return run
    tree = run.tree()
    best = checkpoints.best(metric_of(tree, "keep_best"), goal_of(tree, "keep_best"), unread=unread)
    return OpenedRun(best, logdir)


def _logdir_of(checkpoint: str) -> Logdir:
    """Returns the logdir of a checkpoint: the nearest parent folder with a `params.txt`."""
    folder = os.path.abspath(checkpoint) if files.is_local(checkpoint) else checkpoint
    found = os.path.dirname(os.path.dirname(folder))
    while (above := os.path.dirname(folder)) not in ("", folder):
        if files.exists(files.join(above, PARAMS)):
            found = above
            break
        folder = above
    return Logdir(inspection.relative(found) if files.is_local(found) else found)
