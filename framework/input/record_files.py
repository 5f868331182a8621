"""RecordFiles: base of the sources whose files consist of numbered records."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.input.sources import Source
from tekso.framework.input.splits import files_param, split_of
from tekso.framework.input.text_files import FileChoice
from tekso.framework.params import param


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

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"{self.format_name} files {self.params.get(files_param(self.params, self.split))}"

    def _chosen_by_hash(self, path: str, numbers: range, choice: FileChoice) -> np.ndarray:
        """Returns which of some records of a file are in this split: bool [len(numbers)]."""
        name, fractions = files.base_name(path), (choice.dev_fraction, choice.test_fraction)
        splits = (split_of(f"{name}:{i}", *fractions) for i in numbers)
        return np.fromiter((split == self.split for split in splits), bool, len(numbers))
