"""Answers for the image files of a folder, for tekso-decode: classes, boxes, masks, captions."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from tekso.framework import files
from tekso.framework.json_text import to_json
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.run.assembly import Assembly
    from tekso.tasks.image.image_task import ImageTask


def image_files(folder: str) -> list[str]:
    """Returns the image files in a folder and the folders in it, sorted; none hidden.

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
            if name.startswith("."):
                continue
            if files.is_folder(path):
                folders.append(path)
            elif is_image_name(name):
                found.append(path)
    if not found:
        raise UsageError(f"--input={folder} has no image files ({', '.join(SUFFIXES)})")
    return sorted(found)


def answers_for_images(task: object) -> bool:
    """Returns whether Params of a task are those of one that answers for image files."""
    from tekso.framework.task import Task
    from tekso.tasks.image.file_answers import AnswersFiles

    return isinstance(task, Task.Params) and issubclass(task.owner, AnswersFiles)


def check_pictures(task: ImageTask.Params, pictures: str, folder: str) -> None:
    """Checks that a task makes pictures, and where they are written.

    Args:
      task: Params of a task on images.
      pictures: the folder of the pictures.
      folder: the folder of the images.

    Raises:
      UsageError: the task makes no pictures, or the pictures would be among the images.
    """
    if not task.owner.makes_pictures():
        raise UsageError(
            f"--pictures={pictures}: {task.owner.__name__} makes no pictures; detection draws "
            "boxes, and segmentation makes masks"
        )
    own, images = (os.path.realpath(os.path.expanduser(path)) for path in (pictures, folder))
    if os.path.commonpath([own, images]) == images:
        raise UsageError(
            f"--pictures={pictures} is in the folder of the images, --input={folder}: name another"
        )


@dataclasses.dataclass(frozen=True)
class PictureFolder:
    """Where the pictures of answers are written: the names are those of the images, with .png.

    Images whose names differ only in their ending keep it: 1.jpg.png and 1.webp.png.

    Attributes:
      path: the folder.
      images: the folder of the images.
      files: all images.
    """

    path: str
    images: str
    files: Sequence[str]

    def write(self, file: str, picture: bytes) -> None:
        """Writes the picture of an image file."""
        path = files.join(self.path, self._names[file])
        files.make_folder(os.path.dirname(path))
        files.write_atomically(path, picture)

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        folder = os.path.expanduser(self.images)
        names = {file: os.path.relpath(file, folder) for file in self.files}
        stems = {file: os.path.splitext(name)[0] for file, name in names.items()}
        counts = collections.Counter(stems.values())
        return {
            file: f"{stem if counts[stem] == 1 else names[file]}.png"
            for file, stem in stems.items()
        }


def answer(
    parts: Assembly,
    paths: Sequence[str],
    file: IO[bytes],
    *,
    form: str,
    pictures: PictureFolder | None = None,
) -> int:
    """Writes the answers for all files; returns the number of files that cannot be read.

    Args:
      parts: the experiment, with restored weights.
      paths: the image files.
      file: written to.
      form: "text" for lines of the file and the cells of an answer between tabs, or "file, error,
        reason"; "json" for an object per file.
      pictures: where the pictures of the answers are written.
    """
    task: Any = parts.task
    broken = 0
    for one in task.file_answers(parts.program, parts.input, paths):
        broken += "error" in one.record
        file.write(_lines(task, one.record, form).encode("utf-8", "surrogateescape"))
        file.flush()
        if pictures is not None and one.pixels is not None:
            picture = task.picture(one.pixels, one.arrays, parts.input)
            pictures.write(one.record["file"], picture)
    return broken


def _lines(task: ImageTask, record: Mapping[str, Any], form: str) -> str:
    if form == "json":
        return to_json(record, ensure_ascii=False) + "\n"
    rows = [("error", record["error"])] if "error" in record else task.cells(record)
    return "".join("\t".join([record["file"], *row]) + "\n" for row in rows)
