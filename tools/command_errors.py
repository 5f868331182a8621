"""Errors as the person at the command line sees them: one message for what they can act on.

An error that Tekso raised on purpose, or that the operating system raised about a file, is told in
a line. Anything else is a fault of the program and keeps its traceback.
"""

from __future__ import annotations

import dis
import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import FrameType

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
_PROJECT = "tekso."
_EXPERIMENTS = "tekso.params."
_MAKE_ROOM = "; make room and give the same command again"


class UsageError(Exception):
    """The command line is wrong."""


def run(program: str, action: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Runs an action and tells its errors; returns the exit code.

    Args:
      program: name of the command, before every message.
      action: what to do; returns an exit code.
      show_traceback: tell every error in full.
    """
    try:
        return action()
    except UsageError as error:
        _tell(program, str(error))
        return WRONG_USAGE
    except KeyboardInterrupt:
        _tell(program, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if show_traceback or not is_meant(error):
            traceback.print_exc()
        else:
            _tell(program, f"{_text(error)}{_where(error)}")
        return FAILED


def is_meant(error: BaseException) -> bool:
    """Whether an error speaks to the user: raised by a statement of ours, or by the system."""
    if isinstance(error, OSError) and error.errno is not None:
        return True
    if isinstance(error, NotImplementedError):
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or not _module(place.tb_frame).startswith(_PROJECT):
        return False
    code = place.tb_frame.f_code.co_code
    return dis.opname[code[place.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        hint = _MAKE_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{error.filename}: {error.strerror}{hint}"
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__


def _where(error: BaseException) -> str:
    """The line of an experiment, or of the user's own code, in which an error came about."""
    places = [
        f"\n  (at {frame.f_code.co_filename}:{line}, in {frame.f_code.co_name})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_users(frame)
    ]
    return places[-1] if places else ""


def _is_users(frame: FrameType) -> bool:
    module, file = _module(frame), frame.f_code.co_filename
    if module.startswith(_PROJECT):
        return module.startswith(_EXPERIMENTS)
    libraries = (sysconfig.get_paths()["stdlib"], "<")
    return module != "__main__" and "site-packages" not in file and not file.startswith(libraries)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _tell(program: str, text: str) -> None:
    sys.stdout.flush()
    print(f"{program}: {text}", file=sys.stderr)
