"""Describes a sweep in a file of its folder, so that another command does not mix up its trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from typing import Any

from tekso.framework import bounded, files
from tekso.tools.command_errors import UsageError

_FILE = "sweep.json"


def check_or_write(
    folder: str, flags: Mapping[str, Any], *, may_change: Callable[[Set[str]], bool]
) -> None:
    """Writes the flags of a sweep, or checks that the sweep in the folder has the same.

    Args:
      folder: folder of the sweep.
      flags: {flag: value} of those that determine the trials.
      may_change: returns whether the sweep can be continued with other values of some flags.

    Raises:
      UsageError: it has others, or its file is damaged.
    """
    path = files.join(folder, _FILE)
    if not files.exists(path):
        _write(path, flags)
        return
    try:
        before = bounded.read_json(path)
    except ValueError as error:
        before = error
    if not isinstance(before, dict):
        why = f" ({before})" if isinstance(before, ValueError) else ""
        raise UsageError(
            f"{path} is damaged{why}: it should have the flags of the sweep. If they are those of "
            "this command, remove the file; otherwise give another --logdir"
        )
    changed = [name for name in flags if before.get(name) != flags[name]]
    if changed and may_change(set(changed)):
        _write(path, flags)
    elif changed:
        was = ", ".join(f"--{name} was {json.dumps(before.get(name))}" for name in changed)
        raise UsageError(
            f"{folder} has another sweep ({was}): repeat its command, or give another --logdir"
        )


def _write(path: str, flags: Mapping[str, Any]) -> None:
    files.write_atomically(path, json.dumps(flags, indent=1) + "\n")
