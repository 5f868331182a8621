"""RecordFiles: base of the sources whose files consist of numbered records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.input.sources import Source
from tekso.framework.input.splits import Split, files_param, part, split_of
from tekso.framework.input.text_files import FileChoice
from tekso.framework.params import param

_TOGETHER = 1 << 16  # records that are assigned to splits together; a multiple of 64


class RecordFiles(Source):
    """Base of the sources of records in files; `files` is divided by the numbers of the records.

    Attributes:
      format_name: name of the file format.
    """

    class Params(Source.Params):
        """Params of RecordFiles."""

        files: str = param("Training files: globs, separated by commas.", default="")
        dev_files: str = param("Files for dev; empty: hold out a part of `files`.", default="")
        test_files: str = param("Files for test; empty: hold out a part of `files`.", default="")
        feature: str = param(
            "Feature to read from the tf.train.Example in each record; empty: the whole record.",
            default="",
        )
        holdout: Literal["end", "hash"] = param(
            "What is held out from `files`: the last records of each file, or records by a hash of "
            "the file's name and their number.",
            default="end",
        )
        dev_fraction: float = param("Fraction of `files` for dev, without dev_files.", default=0.1)
        test_fraction: float = param(
            "Fraction of `files` for test, without test_files.", default=0.0
        )

    format_name: ClassVar[str]

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        return FileChoice.unset(params, split)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"{self.format_name} files {self.params.get(files_param(self.params, self.split))}"

    def _masks(self, path: str, count: int, choice: FileChoice) -> Iterator[np.ndarray]:
        """Yields which of the records of a file are in this split, for `Chosen`."""
        name, fractions = files.base_name(path), (choice.dev_fraction, choice.test_fraction)
        first, last = part(count, self.split, *fractions)
        for begin in range(0, count, _TOGETHER):
            numbers = range(begin, min(begin + _TOGETHER, count))
            if self.params.holdout == "end":
                number = np.arange(numbers.start, numbers.stop)
                yield (number >= first) & (number < last)
            else:
                splits = (split_of(f"{name}:{i}", *fractions) for i in numbers)
                yield np.fromiter((split == self.split for split in splits), bool, len(numbers))
