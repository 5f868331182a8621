"""The default text: the source code of Python's standard library, part of every installation."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.splits import Split, check_fractions, split_of
from tekso.framework.input.text_ranges import Range, TextRanges, file_texts
from tekso.framework.input.text_scan import TextScan, scan_text
from tekso.framework.params import param

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class PythonSource(TextRanges):
    """Reads every *.py file of a folder as a text; a hash of its relative path gives its split.

    Empty files are left out. Files that are not UTF-8 are skipped and counted.
    """

    class Params(TextRanges.Params):
        """Params of PythonSource."""

        root: str = param(
            "Folder to read; empty: the standard library of this interpreter.", default=""
        )
        exclude: list[str] = param(
            "Names of folders that are left out. The library's tests are as large as all other "
            "files, are repetitive, and are not installed everywhere.",
            default=["test"],
        )
        dev_fraction: float = param("Share of the files in the dev split.", default=0.05)
        test_fraction: float = param("Share of the files in the test split.", default=0.05)
        max_skipped: int = param(
            "Most malformed files that are skipped; more are an error.", default=100
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds and checks the files.

        Raises:
          InputError: there are no files, or too many are not text.
        """
        super().__init__(params, split=split)
        p = self.params
        check_fractions(p)
        root = p.root or sysconfig.get_path("stdlib")
        names = find(root, exclude=p.exclude)
        if not names:
            raise InputError(
                f"there is no *.py file in {root}: point {p.path_of('root')} at a folder of "
                "Python source, or read other text with --set input.files='texts/*.txt'"
            )
        chosen = [
            name for name in names if split_of(name, p.dev_fraction, p.test_fraction) == split
        ]
        paths = [os.path.join(root, *name.split("/")) for name in chosen]
        self.texts = file_texts(paths, _range, skips=self.skips)

    def describe(self) -> str:
        """Returns a short description of the source."""
        if self.params.root:
            return f"Python source in {self.params.root}"
        return f"standard library of Python {platform.python_version()}"


def _range(path: str) -> tuple[TextScan, Range | None]:
    """Returns a file, and all of it as a record; no record if it is empty."""
    if not files.size_bytes(path):
        return TextScan(0, 0, 0, b""), None
    scan = scan_text(path)
    return scan, (0, scan.end)


def find(root: str, *, exclude: Sequence[str] = ()) -> list[str]:
    """Returns all *.py files below a folder, as sorted relative paths with "/".

    Installed packages and the folders named in `exclude` are left out.
    """
    left_out = _NOT_THE_LIBRARY.union(exclude)
    if not files.is_folder(root):
        return []
    names: list[str] = []
    for folder, folders, found in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        inside = os.path.relpath(folder, root)
        names += [os.path.normpath(os.path.join(inside, name)) for name in found]
    return sorted(name.replace(os.sep, "/") for name in names if name.endswith(".py"))
