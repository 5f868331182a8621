"""What tasks on images share that answer for image files: tekso-decode asks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.input import Input
from tekso.framework.task import Decoded, Program
from tekso.tasks.image.steps import Image


@dataclasses.dataclass(frozen=True)
class FileAnswer:
    """The answer of the model for an image file, or why the file cannot be read.

    Attributes:
      record: what decoding reports, with "file", and "error" if the file cannot be read.
      pixels: the image in its own size; None if it cannot be read, or if no picture needs it.
      arrays: the arrays of the answer, without the dim of the batch; empty without pixels.
    """

    record: dict[str, Any]
    pixels: Image | None = None
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class AnswersFiles:
    """Base of tasks whose model answers for image files."""

    def file_answers(
        self, program: Program, input: Input, paths: Sequence[str]
    ) -> Iterator[FileAnswer]:
        """Yields the answer for every image file, in their order; a malformed file has an error.

        Args:
          program: calls functions with the weights.
          input: the input of the run, or what its `known` returns.
          paths: the files.
        """
        raise NotImplementedError(f"{type(self).__name__} has no file_answers()")

    def line(self, record: Mapping[str, Any]) -> str:
        """Returns a record as text, with the file."""
        raise NotImplementedError(f"{type(self).__name__} has no line()")

    def decoded(self, records: list[dict[str, Any]]) -> Decoded:
        """Returns records with their text."""
        return Decoded("\n".join(map(self.line, records)), records)

    def decoded_files(self, program: Program, input: Input, pattern: str) -> Decoded:
        """Returns the answers for the files that `task.decode` names."""
        paths = files.glob(pattern, what="task.decode")
        return self.decoded([one.record for one in self.file_answers(program, input, paths)])

    def cells(self, record: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Returns the entries of a record as rows of a table, without the file."""
        raise NotImplementedError(f"{type(self).__name__} has no cells()")

    def picture(self, pixels: Image, arrays: Mapping[str, np.ndarray], input: Input) -> bytes:
        """Returns a PNG of the answer for an image; only of tasks that `makes_pictures`.

        Args:
          pixels: the image in its own size.
          arrays: the answer, without the dim of the batch.
          input: the input of the run, or what `ImageInput.known` returns.
        """
        raise NotImplementedError(f"{type(self).__name__} has no picture()")

    @classmethod
    def makes_pictures(cls) -> bool:
        """Returns whether there are pictures of the answers."""
        return cls.picture is not AnswersFiles.picture
