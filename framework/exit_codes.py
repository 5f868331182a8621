"""The exit codes of all commands, for schedulers and scripts. No other file defines one.

    class MyError(Exception):
        exit_code = ExitCode.DAMAGED

An error that has no `exit_code` ends a command with FAILED, or, if the operating system could not
write a file because a disk is full, with DISK_FULL. A command that ends because a signal killed
another process has the exit code of that process, 128 + the number of the signal, as in a shell.
"""

from __future__ import annotations

import enum
import signal

from tekso.framework import out_of_space

_SIGNALS = 128  # exit code of a process that a signal killed, minus the number of the signal


class ExitCode(enum.IntEnum):
    """What ended a command; `docs/faults.md` says what a scheduler should do about each."""

    OK = 0
    FAILED = 1
    WRONG_USAGE = 2
    NOT_FINITE = 3
    DAMAGED = 4
    DISK_FULL = 5
    LOGDIR_LOST = 6
    LOGDIR_IN_USE = 7
    PROCESS_LOST = 8
    STALLED = 60  # also the number of a signal, see `watchdog.py`
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


def signal_of(code: int) -> signal.Signals | None:
    """Returns the signal that ended a process with an exit code; None: the process ended itself."""
    try:
        return signal.Signals(code - _SIGNALS)
    except ValueError:
        return None


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a command that ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, OSError) and out_of_space.code_of(error) is not None:
        return ExitCode.DISK_FULL
    code = getattr(error, "exit_code", None)
    if isinstance(code, ExitCode) or (isinstance(code, int) and signal_of(code) is not None):
        return code
    return ExitCode.FAILED
