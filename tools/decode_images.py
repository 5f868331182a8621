"""Classifies the image files of a folder, for tekso-decode."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from tekso.framework import files
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.run.assembly import Assembly

_MOST_FILES = 512  # classified and written together


def image_files(folder: str) -> list[str]:
    """Returns the image files in a folder and the folders in it, sorted.

    Raises:
      UsageError: there are none.
    """
    from tekso.tasks.image.decoding import SUFFIXES
    from tekso.tasks.image.files import is_image_name

    found, folders = [], [os.path.expanduser(folder)]
    while folders:
        one = folders.pop()
        for name in files.names(one):
            path = files.join(one, name)
            if files.is_folder(path):
                folders.append(path)
            elif is_image_name(name):
                found.append(path)
    if not found:
        raise UsageError(f"--input={folder} has no image files ({', '.join(SUFFIXES)})")
    return sorted(found)


def classifies_images(task: object) -> bool:
    """Returns whether Params of a task are those of an image classifier."""
    from tekso.tasks.image.task import ImageClassification

    return isinstance(task, ImageClassification.Params)


def classify(parts: Assembly, paths: Sequence[str], file: IO[bytes], *, form: str) -> int:
    """Writes one line for each file; returns the number of files that cannot be read.

    Args:
      parts: the experiment, with restored weights.
      paths: the image files.
      file: written to.
      form: "text" for "file, class, probability" or "file, error, reason" between tabs; "json" for
        an object with the likeliest classes or the error.
    """
    task: Any = parts.task
    broken = 0
    for begin in range(0, len(paths), _MOST_FILES):
        some = list(paths[begin : begin + _MOST_FILES])
        for record in task.decode_files(parts.program, parts.input, some).records:
            broken += "error" in record
            file.write(_line(record, form).encode("utf-8", "surrogateescape"))
        file.flush()
    return broken


def _line(record: Mapping[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(record, ensure_ascii=False) + "\n"
    if "error" in record:
        return f"{record['file']}\terror\t{record['error']}\n"
    best = record["classes"][0]
    return f"{record['file']}\t{best['class']}\t{best['probability']:.4f}\n"
