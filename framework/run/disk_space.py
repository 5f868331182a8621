"""Disk space for what a run writes: checks before the write, and errors if the disk fills up."""

from __future__ import annotations

import errno
import os
import shutil

from tekso.framework import files, out_of_space
from tekso.framework.run.checkpoint_errors import DiskFullError

_KEPT = "Earlier checkpoints are unchanged, and the files of this one were removed. "
_FEWER = "; run.keep_last_checkpoints sets how many checkpoints are kept"


def check_free(path: str, needed: int) -> None:
    """Raises a DiskFullError if a new checkpoint with this many bytes does not fit."""
    free = _free_bytes(os.path.dirname(path))
    if free is not None and free < needed:
        raise _full_checkpoint(path, errno.ENOSPC, f"it needs {needed:,} bytes, {free:,} are free")


def full_checkpoint(path: str, error: BaseException) -> DiskFullError | None:
    """Returns the error of a checkpoint for which there was no room; None for another error."""
    code = out_of_space.code_of(error)
    if code is None:
        return None
    reason = out_of_space.reason(code)
    if code == errno.ENOSPC and _has_no_inodes(os.path.dirname(path)):
        reason = "the file system has no room for another file (no free inodes)"
    return _full_checkpoint(path, code, reason)


def full_file(path: str, error: BaseException) -> DiskFullError | None:
    """Returns the error of a file for which there was no room; None for another error."""
    code = out_of_space.code_of(error)
    if code is None:
        return None
    return DiskFullError(
        f"cannot write {path}: {out_of_space.reason(code)}. Incomplete files were removed; "
        f"{out_of_space.cure(code)} and repeat the command"
    )


def _full_checkpoint(path: str, code: int, reason: str) -> DiskFullError:
    cure = out_of_space.cure(code).capitalize()
    fewer = "" if code == errno.EFBIG else _FEWER
    return DiskFullError(
        f"cannot write the checkpoint {path}: {reason}. {_KEPT}{cure} and repeat the command{fewer}"
    )


def _free_bytes(folder: str) -> int | None:
    """Returns the free bytes; None if they are unknown."""
    try:
        return shutil.disk_usage(folder).free if files.is_local(folder) else None
    except OSError:
        return None


def _has_no_inodes(folder: str) -> bool:
    if not files.is_local(folder):
        return False
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0
