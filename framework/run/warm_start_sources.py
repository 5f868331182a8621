"""Opens the checkpoints of a warm start; errors name the setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tekso.framework import files
from tekso.framework.params import REQUIRED
from tekso.framework.run.checkpoint_errors import CheckpointError
from tekso.framework.run.opened import open_run
from tekso.framework.run.weight_files import StoredWeights, is_weight_file, open_weights


class WarmStartError(ValueError):
    """The checkpoints do not give the initial weights that were asked for."""


def open_source(name: str, params: Any, warn: Callable[[str], None]) -> tuple[StoredWeights, str]:
    """Returns the weights of a source, and the folder of its run's tokenizers, or "".

    The bytes of a checkpoint are verified when its weights are read.

    Args:
      name: of the source in `run.warm_start`.
      params: its WarmStart.Params.
      warn: takes the text of a warning.

    Raises:
      WarmStartError: no checkpoint is set.
      CheckpointError: it is missing or damaged.
    """
    path, setting = params.checkpoint, f"run.warm_start.{name}.checkpoint"
    if path is REQUIRED:
        raise WarmStartError(f"{setting} is not set: name a run")
    try:
        if is_weight_file(path):
            return open_weights(path), ""
        run = open_run(path, warn=warn, unread=True)
    except CheckpointError as error:
        error.args = (f"{setting} is {path!r}: {error}",)
        raise
    assets = run.logdir.assets
    return run.checkpoint, assets if files.exists(assets) else ""
