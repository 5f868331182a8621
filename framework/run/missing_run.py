"""A folder without a run: says why, or waits for the run."""

from __future__ import annotations

import os
import sys
import time

from tekso.framework import files
from tekso.framework.run.logdir import PARAMS, Logdir
from tekso.framework.spelling import close_matches

_SHOWN = 5
_POLL_S = 1.0


def reason(path: str) -> str:
    """Returns what is wrong with the folder of a run that has no checkpoint, and what may be meant.

    Returns "" if the folder has a run.
    """
    path = path.rstrip("/") or "/"
    if not files.is_local(path) or files.exists(files.join(path, PARAMS)):
        return ""
    above = os.path.dirname(path) or "."
    if not files.exists(path):
        folder = "" if above == "." else above
        names = close_matches(files.base_name(path), _runs(above), count=2)
        close = [files.join(folder, name) for name in names]
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        return f"there is no folder {path}{hint}"
    if not files.is_folder(path):
        return f"{path} is a file, but a run is a folder"
    inside = [files.join(path, name) for name in _runs(path)]
    more = ", …" if len(inside) > _SHOWN else ""
    return f"{path} contains runs: {', '.join(inside[:_SHOWN])}{more}" if inside else ""


def not_a_folder(path: str) -> str:
    """Returns what to give instead of a file that is no checkpoint, or "" if it is no file."""
    if not files.exists(path) or files.is_folder(path):
        return ""
    text = f"{path} is a file, but a checkpoint is the folder of a run or of a checkpoint"
    if not path.endswith((".npz", ".npy")):
        return f"{text}, or a safetensors file (*.safetensors)"
    return (
        f"{text}, or a safetensors file, which safetensors.numpy.save_file({{path of the weight: "
        "array}, 'weights.safetensors') writes from NumPy arrays"
    )


def wait(logdir: Logdir) -> None:
    """Waits until there is a run, and says so on stderr."""
    if logdir.model() is None:
        why = reason(logdir.path)
        text = f"waiting for a run in {logdir.path} (Ctrl-C ends){why and f': {why}'}"
        print(text, file=sys.stderr, flush=True)
    while logdir.model() is None:
        time.sleep(_POLL_S)


def _runs(folder: str) -> list[str]:
    if not files.is_folder(folder):
        return []
    return [
        name
        for name in sorted(files.names(folder))
        if files.exists(files.join(folder, name, PARAMS))
    ]
