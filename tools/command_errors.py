"""Reports errors at the command line, with a short message where the user can fix them.

- An error that Tekso raises on purpose, or that the operating system raises about a file: one
  sentence.
- An error in the user's own code, or caused by values that this code passes to a layer or to
  TensorFlow: the message, the line of code and the layer.
- Too little memory, whatever raises it: what was allocated, and what to do.
- Any other error may be a bug in Tekso: the message and the line of code. The whole traceback is
  written to a file.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from types import FrameType

from tekso.framework import (
    error_advice,
    files,
    foreign_methods,
    graph_errors,
    out_of_memory,
    out_of_space,
)
from tekso.framework.exit_codes import ExitCode, exit_code_of
from tekso.framework.input.example_errors import WHILE_BUILDING
from tekso.framework.params import Configurable
from tekso.framework.run.report.console import drop_output

OK, FAILED = ExitCode.OK, ExitCode.FAILED
_PROJECT = "tekso."
_EXPERIMENTS = "tekso.params."
_NOTES = (graph_errors.BEFORE_THAT, graph_errors.IN_PIECE, WHILE_BUILDING)
_MORE = "  --traceback prints the whole traceback"


class UsageError(Exception):
    """The command line is wrong."""

    exit_code = ExitCode.WRONG_USAGE


def run(program: str, action: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Runs an action and reports its errors; returns the exit code.

    Args:
      program: name of the command; every message starts with it.
      action: a function that returns an exit code.
      show_traceback: print the whole traceback of every error.
    """
    try:
        code = action()
        sys.stdout.flush()  # reports an error here instead of at exit
        return code
    except UsageError as error:
        _report(program, str(error))
        return error.exit_code
    except KeyboardInterrupt as error:
        _report(program, "interrupted")
        return exit_code_of(error)
    except BrokenPipeError:  # the reader of the pipe closed it
        drop_output(sys.stdout)
        return FAILED
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        else:
            text, more, _ = _message(error).partition(f"\n{_MORE}")
            _report(program, text + _notes(error, (graph_errors.RESUMES,)) + more)
        return exit_code_of(error)


def _message(error: Exception) -> str:
    """Returns the message of an error, with the place in the code of users."""
    of_graph, place = graph_errors.parts(error)
    of_ids = error_advice.advice_for_ids(of_graph or str(error))
    if (text := out_of_memory.explained(error)) is not None:
        cause = error.__cause__ or error  # of an OutOfMemoryError
        return f"{text}{graph_errors.parts(cause)[1] or _places(cause)}"
    if of_graph:
        text = f"{of_graph}; {of_ids}" if of_ids else of_graph
        return f"{type(error).__name__}: {text}{place}\n{_MORE}"
    if is_meant(error):
        hint = of_ids and f"; {of_ids}"
        return f"{_text(error)}{hint}{_places(error)}"
    if isinstance(error, SyntaxError) and os.path.exists(error.filename or ""):
        file, line = str(error.filename), error.lineno or 0
        place = f"\n  (at {file}:{line}){graph_errors.code(file, line)}"
        return f"{type(error).__name__}: {error.msg}{place}\n{_MORE}"
    if _is_of_wrong_use(error):
        text = f"{type(error).__name__}: {error_advice.text_of(error)}"
        return f"{text}{_places(error)}\n{_MORE}"
    if of_ids:  # of a function on a mesh, whose error has no line of code
        text = error_advice.text_of(error).partition("\n")[0]
        hint = "" if of_ids in text else f"; {of_ids}"
        return f"{type(error).__name__}: {text}{hint}\n{_MORE}"
    return f"{type(error).__name__}: {error}{_unexpected(error)}"


def is_meant(error: BaseException) -> bool:
    """Returns whether a raise statement of Tekso, or the operating system, raised an error."""
    if isinstance(error, OSError) and error.errno is not None:
        return True
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or not _module(place.tb_frame).startswith(_PROJECT):
        return False
    code = place.tb_frame.f_code.co_code
    return dis.opname[code[place.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _is_of_wrong_use(error: BaseException) -> bool:
    """Returns whether the user's code raised an error, or values from that code or from Params."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if not _is_library(f)]
    if frames and _is_users(frames[-1]):
        return True
    of_values = isinstance(error, (TypeError, ValueError)) or (
        type(error).__module__.startswith("tensorflow") or foreign_methods.theta_hint(error)
    )
    return bool(of_values) and any(_is_users(frame) or _layer_path(frame) for frame in frames)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and (code := out_of_space.code_of(error)) is not None:
        hint = f"{out_of_space.cure(code)} and repeat the command"
        what = error.filename or "the output"
        return f"cannot write {what}: {out_of_space.reason(code)}; {hint}"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        is_missing = isinstance(error, FileNotFoundError) and isinstance(error.filename, str)
        hint = files.near(error.filename) if is_missing else ""
        is_relative = is_missing and files.is_local(error.filename) and not hint
        if is_relative and not os.path.isabs(os.path.expanduser(error.filename)):
            hint = f" (relative to {os.getcwd()})"
        return f"{error.filename}: {error.strerror}{_setting_of(error)}{hint}"
    has_text = not isinstance(error, KeyError) or type(error).__str__ is not KeyError.__str__
    text = str(error) if has_text or not error.args else str(error.args[0])
    return text or type(error).__name__


def _setting_of(error: OSError) -> str:
    """Returns ", from <path of the setting>" if a Params field has the file or its folder."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        if not isinstance(owner, Configurable) or not hasattr(owner, "params"):
            continue
        params = owner.params
        for name in params.fields():
            with contextlib.suppress(AttributeError):  # it is not set
                value = params.get(name)
                is_path = isinstance(value, str) and value.strip("/")
                if is_path and f"{error.filename}/".startswith(f"{value.rstrip('/')}/"):
                    return f", from {params.path_of(name)}"
    return ""


def _places(error: BaseException) -> str:
    """Returns the line of an experiment or of user code that led to an error, and the layer."""
    users, layer = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_users(frame):
            users = f"\n  (at {code.co_filename}:{line}, in {code.co_name})"
            users += "" if is_meant(error) else graph_errors.code(code.co_filename, line)
        path = _layer_path(frame)
        if path:
            layer = f"\n  (in the layer {path})"
    return users + layer + _notes(error, _NOTES)


def _notes(error: BaseException, beginnings: tuple[str, ...]) -> str:
    """Returns the notes of an error that begin in one of these ways, a line each."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(beginnings)]
    return "".join(f"\n  ({note})" for note in dict.fromkeys(notes))


def _unexpected(error: BaseException) -> str:
    """Returns the place of an unexpected error; writes its whole traceback to a file."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tekso-traceback-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.writelines(traceback.format_exception(error))
        where = f"  the whole traceback is in {file.name}"
    except OSError:  # a full disk
        where = _MORE
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_library(frame)
    ]
    places = _places(error)
    if not places and frames:
        code, line = frames[-1]
        places = f"\n  (at {code.co_filename}:{line}, in {code.co_name})"
        places += graph_errors.code(code.co_filename, line)
    return f"{places}\n{where}"


def _layer_path(frame: FrameType) -> str:
    """Returns path and class of the layer whose `fprop` a frame runs.

    Returns "" for the root layer, and if the frame runs no `fprop`.
    """
    layers = sys.modules.get("tekso.framework.layer")
    layer = frame.f_locals.get("self")
    if layers is None or frame.f_code.co_name != "fprop" or not isinstance(layer, layers.Layer):
        return ""
    return layer.path and f"{layer.path} ({type(layer).__name__})"


def _is_users(frame: FrameType) -> bool:
    module = _module(frame)
    if module.startswith(_PROJECT):
        return module.startswith(_EXPERIMENTS)
    return module != "__main__" and not _is_library(frame)


def _is_library(frame: FrameType) -> bool:
    return graph_errors.is_library_file(frame.f_code.co_filename)


def _module(frame: FrameType) -> str:
    """Returns the name of a frame's module, also of a module of Tekso that `python -m` runs."""
    name = str(frame.f_globals.get("__name__", ""))
    started = getattr(frame.f_globals.get("__spec__"), "name", "") if name == "__main__" else ""
    return started if started.startswith(_PROJECT) else name


def _report(program: str, text: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        drop_output(sys.stdout)
    with contextlib.suppress(OSError):
        print(f"{program}: {text}", file=sys.stderr)
