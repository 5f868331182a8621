"""Text files as a source: a record is a file or a line."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.line_index import Chosen, LineIndex
from tekso.framework.input.splits import (
    Split,
    check_fractions,
    files_param,
    held_out_fractions,
    part,
    split_of,
    why_empty,
)
from tekso.framework.input.text_ranges import Range, TextRanges, file_texts, line_texts
from tekso.framework.input.text_scan import TextScan, bytes_of_characters, scan_text
from tekso.framework.params import param

BLOCK = 1 << 16  # lines that are assigned to splits together


class TextFiles(TextRanges):
    """Text files.

    Without dev_files, the end of every file is held out, or a fraction of the records by hash.
    """

    class Params(TextRanges.Params):
        """Params of TextFiles."""

        files: str = param("Training files: globs, separated by commas.", default="")
        dev_files: str = param("Files for dev; empty: hold out a part of `files`.", default="")
        test_files: str = param("Files for test; empty: hold out a part of `files`.", default="")
        unit: Literal["file", "line"] = param(
            "Whether a record is a file or a line, without its line end; blank lines are skipped.",
            default="file",
        )
        holdout: Literal["end", "hash"] = param(
            "What is held out from `files`: the end of each file, or records by a hash of the "
            "file's name and, for lines, their number.",
            default="end",
        )
        dev_fraction: float = param("Fraction of `files` for dev, without dev_files.", default=0.1)
        test_fraction: float = param(
            "Fraction of `files` for test, without test_files.", default=0.0
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the files and checks them.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no files are given, too many are not text, or no records are left.
        """
        super().__init__(params, split=split)
        choice = FileChoice.of(self.params, split)
        self.skips.why_nothing = why_empty(self.params, split, "files")
        self._dev, self._test = choice.dev_fraction, choice.test_fraction
        if self.params.unit == "line":
            self.texts = line_texts(choice.paths, self._chosen, skips=self.skips)
        else:
            self.texts = file_texts(choice.paths, self._range, skips=self.skips)

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        return FileChoice.unset(params, split)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"text files {self.params.get(files_param(self.params, self.split))}"

    def _range(self, path: str) -> tuple[TextScan, Range | None]:
        scan = scan_text(path)
        if self.params.holdout == "hash":
            chosen = split_of(files.base_name(path), self._dev, self._test) == self.split
            return scan, (scan.begin, scan.end) if chosen else None
        first, last = part(scan.num_characters, self.split, self._dev, self._test)
        if first == last:
            return scan, None
        begin, end = bytes_of_characters(path, [first, last], begin=scan.begin)
        return scan, (begin, end)

    def _chosen(self, path: str, lines: LineIndex) -> Chosen:
        count = len(lines)
        numbers = [np.arange(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)]
        if self.params.holdout == "end":
            first, last = part(count, self.split, self._dev, self._test)
            return Chosen((block >= first) & (block < last) for block in numbers)
        name = files.base_name(path)

        def of_hash(i: int) -> bool:
            return split_of(f"{name}:{i}", self._dev, self._test) == self.split

        return Chosen(np.fromiter(map(of_hash, block.tolist()), bool) for block in numbers)


class FileChoice:
    """The files of a split, and the fractions of them that are held out.

    Attributes:
      paths: the files.
      dev_fraction: fraction of them that is dev text; 0.0 if dev has its own files.
      test_fraction: fraction of them that is test text; 0.0 if test has its own files.
    """

    def __init__(self, paths: list[str], dev_fraction: float, test_fraction: float) -> None:
        self.paths = paths
        self.dev_fraction = dev_fraction
        self.test_fraction = test_fraction

    @staticmethod
    def unset(params: Any, split: Split) -> str:
        """Returns that neither `files` nor files of the split are set, or ""."""
        if params.files or {"train": "", "dev": params.dev_files, "test": params.test_files}[split]:
            return ""
        path = params.path_of("files")
        return f"{path} is empty: set the files to read, as in --set {path}='FOLDER/*'"

    @staticmethod
    def of(params: Any, split: Split) -> FileChoice:
        """Reads files, dev_files, test_files, dev_fraction and test_fraction of the Params.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no files are given, or the split has no data.
          ValueError: a fraction is out of range.
        """
        if why := FileChoice.unset(params, split):
            raise InputError(why)
        own = {"train": "", "dev": params.dev_files, "test": params.test_files}
        check_fractions(params)
        if own[split]:
            name = params.path_of(f"{split}_files")
            return FileChoice(files.glob(own[split], what=name), *_all_of(split))
        dev, test = held_out_fractions(params, "files")
        if {"train": 1.0, "dev": dev, "test": test}[split] == 0.0:
            raise InputError(
                f"there is no {split} text: set {params.path_of(f'{split}_files')}, or "
                f"{split}_fraction above 0"
            )
        return FileChoice(files.glob(params.files, what=params.path_of("files")), dev, test)


def _all_of(split: Split) -> tuple[float, float]:
    """Returns the fractions (dev, test) for which whole files belong to a split."""
    return (1.0 if split == "dev" else 0.0), (1.0 if split == "test" else 0.0)
