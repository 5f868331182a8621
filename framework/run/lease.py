"""Leases: while a process reads a checkpoint, training does not delete it.

    a reader holds        a shared lock of checkpoint.json
    training asks for     an exclusive lock, without waiting: it deletes a checkpoint that is being
                          read at a later save

The kernel releases the lock of a process that ends, however it ends. A file system without locks
has no leases: a reader may then find that the checkpoint was deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator

from tekso.framework import files
from tekso.framework.run.checkpoint_errors import DeletedCheckpointError

DESCRIPTION = "checkpoint.json"
_AT_ONCE = os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO, whose reader will say that it is no file


class Lease:
    """A lease on a checkpoint, until `release` or until no variable refers to it.

    Raises:
      DeletedCheckpointError: the checkpoint does not exist, or is being deleted.
    """

    def __init__(self, path: str) -> None:
        if not files.exists(path):
            raise DeletedCheckpointError(path)
        name = files.join(path, DESCRIPTION)
        if not files.is_local(path) or not files.exists(name):  # the latter is damaged
            return
        try:
            file = os.open(name, os.O_RDONLY | _AT_ONCE)
        except FileNotFoundError:
            raise DeletedCheckpointError(path) from None
        except OSError:  # reading it will explain why
            return
        self._release = weakref.finalize(self, os.close, file)
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DeletedCheckpointError(path) from None
        if not files.exists(name):  # it was deleted before it was locked
            raise DeletedCheckpointError(path)

    def release(self) -> None:
        """Ends the lease."""
        release = getattr(self, "_release", None)
        if release is not None:
            release()


@contextlib.contextmanager
def unused(path: str) -> Iterator[bool]:
    """Yields whether no process reads a checkpoint; none can begin to within the block."""
    name = files.join(path, DESCRIPTION)
    if not files.is_local(path) or not files.exists(name):
        yield True
        return
    can_write = os.access(name, os.W_OK)  # NFS requires it for an exclusive lock
    file = os.open(name, (os.O_RDWR if can_write else os.O_RDONLY) | _AT_ONCE)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_unused = True
        except OSError as error:
            is_unused = not isinstance(error, BlockingIOError)  # a file system without locks
        yield is_unused
    finally:
        os.close(file)
