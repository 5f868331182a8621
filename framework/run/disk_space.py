"""Disk space for a checkpoint: checks before the write, and errors if the disk fills up."""

from __future__ import annotations

import errno
import os
import shutil

from tekso.framework import files
from tekso.framework.run.checkpoint_errors import DiskFullError, first_line

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_free(path: str, needed: int) -> None:
    """Raises a DiskFullError if a new folder with so many bytes does not fit."""
    free = free_bytes(os.path.dirname(path))
    if free is not None and free < needed:
        raise DiskFullError(disk_full_text(path, needed, free, None))


def free_bytes(folder: str) -> int | None:
    """Returns the free bytes; None if they are unknown."""
    try:
        return shutil.disk_usage(folder).free if files.is_local(folder) else None
    except OSError:
        return None


def means_disk_full(error: BaseException) -> bool:
    """Whether an error of a write means that the disk, or a quota, is full."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    return any(os.strerror(code) in str(error) for code in _DISK_FULL)


def disk_full_text(path: str, needed: int, free: int | None, error: BaseException | None) -> str:
    """Returns the message of a DiskFullError."""
    cause = f" ({first_line(error)})" if error is not None else ""
    have = f"{free:,} are free" if free is not None else "the file system is full"
    return (
        f"not enough disk space for the checkpoint {path}: it needs {needed:,} bytes, {have}"
        f"{cause}. Earlier checkpoints are unchanged, and the files of this one were removed. Free "
        "disk space and repeat the command; run.keep_last_checkpoints sets how many checkpoints "
        "are kept"
    )
