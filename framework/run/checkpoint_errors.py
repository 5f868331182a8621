"""Errors of checkpoints."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint could not be written, found or read; the text says what to do."""


class DiskFullError(CheckpointError):
    """There is not enough disk space for a checkpoint."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or its bytes have changed."""


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error, or its type if it has none."""
    text = str(getattr(error, "message", "") or error)
    return text.splitlines()[0] if text else type(error).__name__
