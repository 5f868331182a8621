"""Reads on which devices a run trained, from the description of its newest checkpoint."""

from __future__ import annotations

from tekso.framework import bounded, files
from tekso.framework.counting import counted
from tekso.framework.run.lease import DESCRIPTION
from tekso.framework.run.logdir import Logdir

DEVICES = "devices"
"""The name under which a comparison has them, besides the paths of Params."""


def read(logdir: Logdir) -> str:
    """Returns the devices, as in "2 CPU"; "": the run has no checkpoint that says so."""
    folder = logdir.checkpoints
    for name in sorted(files.names(folder) if files.is_folder(folder) else (), reverse=True):
        path = files.join(folder, name, DESCRIPTION)
        if not files.exists(path):
            continue
        try:
            found = bounded.parse_json(bounded.read(path).decode("utf-8"))
            conditions = found["conditions"]
            devices, processes = str(conditions["devices"]), int(conditions["processes"])
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if processes != 1:
            return f"{devices}, {counted(processes, 'process', 'processes')}"
        return devices
    return ""
