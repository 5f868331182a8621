"""Sizes of a task that its data determines, as the checkpoints of a run store them."""

from __future__ import annotations

import os
from typing import Any

from tekso.framework.params import REQUIRED, Params
from tekso.framework.params import tree as params_tree
from tekso.framework.run.checkpoint_description import describe
from tekso.framework.run.checkpoint_errors import CheckpointError
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.logdir import Logdir


def fill(params: Any, stored: Any) -> None:
    """Sets the open fields of Params to those of stored Params, where these have a value."""
    left = [path for path, value, _ in params_tree.walk(params) if value is REQUIRED]
    values = {path: stored.get(path) for path in left if path in stored}
    params.set({path: value for path, value in values.items() if value is not REQUIRED})


def filled(params: Any, assets_dir: str) -> Any:
    """Returns a copy of the Params of a task with the open sizes that a run has stored.

    Args:
      params: Params of the task.
      assets_dir: folder of the assets of the run.

    Returns:
      None: no size is open, or the run has no checkpoint with it that can be read.
    """
    found = params.copy()
    checkpoints = Checkpoints(Logdir(os.path.dirname(assets_dir.rstrip("/"))).checkpoints)
    for step in reversed(checkpoints.steps()):
        try:
            description = describe(checkpoints.path(step))
            if not description.task:
                return None
            fill(found, Params.from_text(description.task))
        except (CheckpointError, ValueError, ImportError):  # what reads the weights reports it
            continue
        return found if found != params else None
    return None
