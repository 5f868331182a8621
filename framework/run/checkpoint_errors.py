"""Errors of checkpoints."""

from __future__ import annotations

from tekso.framework.exit_codes import ExitCode


class CheckpointError(Exception):
    """A checkpoint could not be written, found or read; the text says what to do."""


class WriteError(CheckpointError):
    """A checkpoint cannot be written."""


class DiskFullError(WriteError):
    """There is not enough disk space for a checkpoint or another file."""

    exit_code = ExitCode.DISK_FULL


class DeletedCheckpointError(CheckpointError):
    """A checkpoint does not exist any more.

    Args:
      path: folder of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the checkpoint {path} was deleted while it was opened or read: a run in progress "
            "deletes old checkpoints. Repeat the command, or increase run.keep_last_checkpoints"
        )


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or its bytes have changed."""

    exit_code = ExitCode.DAMAGED


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error, or its type if it has none."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path of a temporary file
    text = str(getattr(error, "message", "") or error)
    return text.splitlines()[0] if text else type(error).__name__
