"""Opens a run for a task of another run; see `Task.use_trained`."""

from __future__ import annotations

import os

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import reason_of
from tekso.framework.run import inspection
from tekso.framework.run.checkpoint_errors import CheckpointError
from tekso.framework.run.opened import open_run
from tekso.framework.run.weights import weights_of
from tekso.framework.trained import TrainedError, TrainedModel


def load_trained(path: str) -> TrainedModel:
    """Returns the task and weights of a run, from its newest good checkpoint or the one given.

    Args:
      path: folder of a run, "RUN/best", "RUN/STEP", or folder of a checkpoint.

    Raises:
      TrainedError: there is no good checkpoint, its Params cannot be read, or its tokenizer is not
        stored and the data is missing.
    """
    try:
        run = open_run(os.path.expanduser(path))
        task = run.task()
        theta = task.theta(weights_of(task, run.checkpoint))
        input = inspection.known_input(run.tree(), run.logdir.assets)
    except (CheckpointError, InputError, OSError) as error:
        raise TrainedError(reason_of(error)) from error
    return TrainedModel(run.model, run.checkpoint.path, task, theta, input)
