"""Base class of parallel files, TSV and JSON lines: one pair per line.

A record consists of one line of each of its files: two files if source and target have separate
files, otherwise one. The constructor reads the files once, block by block, to find the lines. In
memory is the location of every 64th line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.line_index import Chosen, LineIndex
from tekso.framework.input.line_records import LineRecord, LineRecords
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.sources import Digest
from tekso.framework.input.splits import Split, check_fractions, part, split_of
from tekso.framework.input.text import NotTextError, check_mark
from tekso.framework.params import param
from tekso.tasks.mt.pairs import Pair, PairSource

_BLOCK = 1 << 16  # lines that are assigned to splits together


class UnequalLinesError(InputError):
    """Parallel files have different numbers of lines."""

    def __init__(self, paths: Sequence[str], counts: Sequence[int]) -> None:
        listed = ", ".join(
            f"{path} has {count:,} lines" for path, count in zip(paths, counts, strict=True)
        )
        super().__init__(
            f"{listed}: line i of one file must be the translation of line i of the other, so the "
            "files must have the same number of lines"
        )
        self.paths = tuple(paths)
        self.counts = tuple(counts)


class LinePairs(PairSource):
    """Base of corpora with one pair per line; a subclass lists the files and parses the lines."""

    class Params(PairSource.Params):
        """Params of LinePairs."""

        holdout: Literal["end", "hash"] = param(
            "What is held out if dev or test has no files: the end of each file, or pairs by a "
            "hash of their source, so that equal sources are in the same split.",
            default="end",
        )
        dev_fraction: float = param("Share held out for dev, if dev has no files.", default=0.02)
        test_fraction: float = param("Share held out for test, if test has no files.", default=0.0)

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the files and the lines in them.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no files are given, the files do not match, or no pair is left.
        """
        super().__init__(params, split=split)
        check_fractions(self.params)
        rows, dev, test = self._choose(split)
        indices: list[LineIndex] = []
        for paths in rows:
            index = LineIndex(paths, check=_check_mark)
            if len(set(index.counts)) > 1:
                raise UnequalLinesError(paths, index.counts)
            indices.append(index)
        chosen = [Chosen(self._masks(index, dev, test)) for index in indices]
        self._lines = LineRecords(rows, indices, chosen)
        if not len(self._lines):
            raise self.skips.nothing_left()

    def __len__(self) -> int:
        return len(self._lines)

    def origin(self, index: int) -> Origin:
        """Returns the location of a record: its line in the first file."""
        return _origins(self._lines[index])[0]

    def fingerprint(self) -> str:
        """Returns a digest of all records."""
        total = Digest()
        for content in self._lines.digests:
            total.add(content)
        total.begin(4 * len(self))  # the number of the files of each record
        for number, count in enumerate(self._lines.counts):
            for begin in range(0, count, _BLOCK):
                total.update(np.full(min(_BLOCK, count - begin), number, np.int32).tobytes())
        total.begin(4 * len(self))  # the line of each record
        for chosen in self._lines.numbers():
            total.update(chosen.astype(np.int32).tobytes())
        return total.hexdigest()

    def _choose(self, split: Split) -> tuple[list[tuple[str, ...]], float, float]:
        """Returns the tuples of parallel files of a split, and their shares of dev and test."""
        raise NotImplementedError

    def _pair(self, lines: Sequence[bytes], origins: Sequence[Origin], where: str) -> Pair:
        """Parses lines into a pair.

        Raises:
          BadRecordError: a line is malformed; the message begins with `where`.
        """
        raise NotImplementedError

    def _source_of(self, line: bytes) -> bytes:
        """Returns the source text in a line of the first file; any bytes if it is malformed."""
        raise NotImplementedError

    def _masks(self, index: LineIndex, dev: float, test: float) -> Iterator[np.ndarray]:
        """Yields which of the lines are in this split."""
        if self.params.holdout == "end" or dev + test in (0.0, 1.0):
            first, last = part(len(index), self.split, dev, test)
            for begin in range(0, len(index), _BLOCK):
                number = np.arange(begin, min(begin + _BLOCK, len(index)))
                yield (number >= first) & (number < last)
            return
        for lines in index.blocks():
            mask = np.zeros(len(lines), bool)
            for i, (begin, end) in enumerate(lines.bounds[0].tolist()):
                source = self._source_of(lines.data[0][begin:end])
                found = split_of(source.decode("utf-8", "surrogateescape"), dev, test)
                mask[i] = found == self.split
            yield mask

    def _read(self, index: int) -> Pair:
        try:
            line = self._lines[index]
        except OSError as error:
            raise BadRecordError(
                Origin(self.describe(), index, "record"), reason_of(error)
            ) from error
        return self._pair(line.data, _origins(line), f"line {line.number + 1}: ")

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        for line in self._lines:
            origins = _origins(line)
            record: Any
            try:
                record = self._pair(line.data, origins, f"line {line.number + 1}: ")
            except BadRecordError as error:
                record = error
            yield origins[0], record


def _origins(line: LineRecord) -> list[Origin]:
    return [Origin(path, at) for path, at in zip(line.paths, line.offsets, strict=True)]


def _check_mark(path: str, block: bytes, offset: int) -> None:
    """Checks that a file does not have an encoding with other line ends, such as UTF-16.

    Raises:
      InputError: it has.
    """
    if offset:
        return
    try:
        check_mark(block)
    except NotTextError as error:
        raise InputError(f"{path} is {error}; convert it to UTF-8") from error


def split_fractions(
    params: Any, split: Split, *, dev_has_files: bool, test_has_files: bool, what: str
) -> tuple[float, float]:
    """Returns the shares of the split's files that are dev and test.

    Args:
      params: Params with dev_fraction and test_fraction.
      split: the split that is read.
      dev_has_files: whether dev has separate files, so that no training text is held out for it.
      test_has_files: the same for test.
      what: name of the Param with the files of the split, for the error.

    Raises:
      InputError: the split is empty.
    """
    if {"train": False, "dev": dev_has_files, "test": test_has_files}[split]:
        return (1.0 if split == "dev" else 0.0), (1.0 if split == "test" else 0.0)
    dev = 0.0 if dev_has_files else params.dev_fraction
    test = 0.0 if test_has_files else params.test_fraction
    if {"train": 1.0, "dev": dev, "test": test}[split] == 0.0:
        raise InputError(
            f"there is no {split} text: set {params.path_of(what)}, or {split}_fraction above 0"
        )
    return dev, test
