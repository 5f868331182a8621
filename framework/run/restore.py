"""Restores the state of a program from a checkpoint."""

from __future__ import annotations

import functools

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.run.checkpoints import Checkpoint, CheckpointError, DamagedCheckpointError


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
        raise CheckpointError(
            f"{checkpoint.path} cannot be restored: {error}. Undo the changes since it was saved, "
            "or train in another --logdir"
        ) from error
