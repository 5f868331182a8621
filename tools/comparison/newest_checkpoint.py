"""Reads from the newest checkpoint of a run on which devices it trained, and its metric's goal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.counting import counted
from tekso.framework.run.lease import DESCRIPTION
from tekso.framework.run.logdir import Logdir

DEVICES = "devices"
"""The name under which a comparison has them, besides the paths of Params."""


def devices(logdir: Logdir) -> str:
    """Returns the devices, as in "2 CPU"; "": the run has no checkpoint that says so."""
    for found in _descriptions(logdir):
        try:
            conditions = found["conditions"]
            devices, processes = str(conditions["devices"]), int(conditions["processes"])
        except (ValueError, TypeError, KeyError):
            continue
        if processes != 1:
            return f"{devices}, {counted(processes, 'process', 'processes')}"
        return devices
    return ""


def goal(logdir: Logdir) -> str:
    """Returns "min" or "max", of the metric of `run.keep_best`; "": no checkpoint says so."""
    for found in _descriptions(logdir):
        if isinstance(found, dict) and found.get("goal") in ("min", "max"):
            return str(found["goal"])
    return ""


def _descriptions(logdir: Logdir) -> Iterator[Any]:
    """Yields the descriptions of checkpoints that can be read, the newest first."""
    folder = logdir.checkpoints
    for name in sorted(files.names(folder) if files.is_folder(folder) else (), reverse=True):
        path = files.join(folder, name, DESCRIPTION)
        if not files.exists(path):
            continue
        try:
            yield bounded.parse_json(bounded.read(path).decode("utf-8"))
        except (OSError, ValueError):
            continue
