"""The exit codes of all commands, for schedulers and scripts. No other file defines one.

    class MyError(Exception):
        exit_code = ExitCode.DAMAGED

An error that has no `exit_code` ends a command with FAILED, or, if the operating system could not
write a file because a disk is full, with DISK_FULL.
"""

from __future__ import annotations

import enum

from tekso.framework import out_of_space


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


def exit_code_of(error: BaseException) -> ExitCode:
    """Returns the exit code of a command that ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, OSError) and out_of_space.code_of(error) is not None:
        return ExitCode.DISK_FULL
    code = getattr(error, "exit_code", None)
    return code if isinstance(code, ExitCode) else ExitCode.FAILED
