"""Restores the state of a program from a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.state import checked_state
from tekso.framework.run.checkpoints import Checkpoint, CheckpointError, DamagedCheckpointError
from tekso.framework.weight_spec import WeightSpec


def restore(program: ExecutionProgram, checkpoint: Checkpoint) -> None:
    """Restores the state of a program from a checkpoint.

    All processes run the same operations, also if one of them reads damaged bytes.

    Raises:
      DamagedCheckpointError: bytes that this process read have changed.
      CheckpointError: the checkpoint does not fit the program; names the tensors.
    """
    damage: list[DamagedCheckpointError] = []
    try:
        read = functools.partial(checkpoint.stored, damaged=damage.append)
        program.restore(read, checkpoint.keys)
        if damage:
            raise damage[0]
    except ValueError as error:
        raise CheckpointError(_text(checkpoint, error)) from error


def problem(specs: Mapping[str, WeightSpec], checkpoint: Checkpoint) -> str:
    """Returns why a checkpoint does not fit a program, as `restore` would find, or "".

    Args:
      specs: of the state of the program, by key.
      checkpoint: its values are not read.
    """
    try:
        checked_state(specs, checkpoint.stored, checkpoint.keys)
    except ExecutionError as error:
        return _text(checkpoint, error)
    return ""


def _text(checkpoint: Checkpoint, error: ValueError) -> str:
    return (
        f"{checkpoint.path} cannot be restored: {error}. Undo the changes since it was saved, "
        "or train in another --logdir"
    )
