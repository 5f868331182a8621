"""Reads the decoded texts of a run to compare."""

from __future__ import annotations

from tekso.framework import files
from tekso.framework.run.logdir import Logdir

_MOST_SAMPLE = 4000  # characters


def read(logdir: Logdir) -> dict[str, str]:
    """Returns {name: decoded text}: samples.txt, and the newest text of every evaluation."""
    paths = {"samples.txt": logdir.samples}
    folder = logdir.file("decoded")
    for name in files.names(folder) if files.is_folder(folder) else ():
        if not files.is_folder(files.join(folder, name)):
            continue
        texts = [one for one in files.names(files.join(folder, name)) if one.endswith(".txt")]
        if texts:
            paths[f"decoded/{name}"] = files.join(folder, name, max(texts))
    return {
        name: files.read(path).decode("utf-8", "replace")[:_MOST_SAMPLE]
        for name, path in paths.items()
        if files.exists(path)
    }
