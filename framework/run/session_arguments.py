"""Checks what a session is given, apart from arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from tekso.framework import registry
from tekso.framework.experiment import Experiment
from tekso.framework.params.types import type_name
from tekso.framework.run.foreign_calls import shown
from tekso.framework.run.session_batches import SessionError

# Classes in the text of Params that other processes cannot import.
_UNREADABLE = re.compile(r"__main__:[\w.]+|[\w.]+:[\w.]*<locals>[\w.]*")


def class_of(experiment: Any, *, caller: str = "Session") -> type[Experiment]:
    """Returns the class of an experiment, given itself or its key.

    Args:
      experiment: the class or the key.
      caller: what it was given to, "Session" or "Lab", for the error.

    Raises:
      SessionError: it is neither.
      UnknownExperimentError: no experiment has the key.
    """
    kind = registry.get(experiment) if isinstance(experiment, str) else experiment
    if isinstance(kind, type) and issubclass(kind, Experiment):
        return kind
    given = f"an instance of {type_name(type(kind))}"
    if isinstance(kind, type):
        given = f"the class {type_name(kind)}"
    raise SessionError(
        f"{caller} expects the key or the class of an Experiment, given {given}: "
        f'{caller}("lm.text_files.Bytes") or {caller}(Mine)'
    )


def check_settings(settings: Any) -> None:
    """Raises a SessionError if settings are no mapping, or have an execution that is a name."""
    if not isinstance(settings, Mapping | None):
        raise SessionError(
            "settings are {path: value}, as in {'run.steps': 100}, given "
            f"{type(settings).__name__} {shown(settings)}"
        )
    if isinstance(chosen := (settings or {}).get("execution"), str):
        raise SessionError(
            f"execution is {chosen!r}, but must be Params, as in {{'execution': "
            "Pipelined.Params(num_stages=2, num_micro_batches=4)}, of "
            "tekso.framework.execution"
        )


def folder_of(logdir: Any) -> str:
    """Returns the path of a folder.

    Raises:
      SessionError: it is empty, or no path.
    """
    if not isinstance(logdir, str | os.PathLike):
        raise SessionError(f"logdir is {shown(logdir)}, but must be the path of a folder")
    if not (path := os.fspath(logdir)):
        raise SessionError("logdir is empty: give a new folder")
    return os.path.expanduser(path)


def unreadable(params: str) -> str:
    """Returns a text about classes in the text of Params that only this process has; "": none."""
    if not (found := _UNREADABLE.findall(params)):
        return ""
    return (
        f"classes that other programs cannot import: {', '.join(sorted(set(found)))}. load_task "
        "works in a process that defines them; for commands, define them in a module"
    )
