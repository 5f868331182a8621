"""Errors of a write without room for it: a full disk, a quota, the limit of the size of files."""

from __future__ import annotations

import errno
import os
import resource

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def code_of(error: BaseException) -> int | None:
    """Returns the `errno` of such an error, and None for any other.

    Libraries such as TensorFlow and safetensors report it only as text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in CODES else None
    return next((code for code in CODES if os.strerror(code) in str(error)), None)


def reason(code: int) -> str:
    """Returns what is exhausted."""
    if code == errno.ENOSPC:
        return "there is no space left on the disk"
    if code == errno.EDQUOT:
        return "the disk quota is used up"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "the file is larger than the file system permits"
    return f"the file exceeds the size limit of {limit:,} bytes (ulimit -f)"


def cure(code: int) -> str:
    """Returns what to do before the command is repeated."""
    if code == errno.EFBIG:
        return "increase the limit"
    return "remove files or increase the quota" if code == errno.EDQUOT else "free disk space"
