"""Base class of parallel files, TSV and JSON lines: one pair per line.

A record consists of one line of each of its files: two files if source and target have separate
files, otherwise one. The constructor reads the files once to find the lines. In memory is only the
location of each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.input.skips import BadRecordError, InputError, Origin
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split, check_fractions, part, split_of
from tekso.framework.input.text import NotTextError, check_mark
from tekso.framework.input.text_files import line_bounds
from tekso.framework.params import param
from tekso.tasks.mt.pairs import Pair, PairSource


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
        self._rows, dev, test = self._choose(split)
        self._digests: list[bytes] = []
        all_lines: list[np.ndarray] = []
        all_bounds: list[np.ndarray] = []
        for paths in self._rows:
            data = [_read_text(path) for path in paths]
            bounds = [line_bounds(one) for one in data]
            if len({len(one) for one in bounds}) > 1:
                raise UnequalLinesError(paths, [len(one) for one in bounds])
            lines = self._chosen(data[0], bounds[0], dev, test)
            all_lines.append(lines.astype(np.int32))
            all_bounds.append(np.stack([one[lines] for one in bounds], axis=1))
            self._digests.append(bytes.fromhex(digest(data)))
        self._line = np.concatenate(all_lines)  # line number of each record
        self._row = np.repeat(  # index of the files of each record
            np.arange(len(all_lines), dtype=np.int32), [len(lines) for lines in all_lines]
        )
        self._begins = np.concatenate([bounds[..., 0] for bounds in all_bounds])  # [records, files]
        self._sizes = np.concatenate(
            [(bounds[..., 1] - bounds[..., 0]).astype(np.int32) for bounds in all_bounds]
        )
        if not len(self._line):
            raise self.skips.nothing_left()

    def __len__(self) -> int:
        return len(self._line)

    def origin(self, index: int) -> Origin:
        """Returns the location of a record: its line in the first file."""
        return self._origins(index)[0]

    def fingerprint(self) -> str:
        """Returns a digest of all records."""
        return digest([*self._digests, self._row.tobytes(), self._line.tobytes()])

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

    def _chosen(self, data: bytes, bounds: np.ndarray, dev: float, test: float) -> np.ndarray:
        """Returns the numbers of the lines in this split."""
        if self.params.holdout == "end" or dev + test in (0.0, 1.0):
            return np.arange(*part(len(bounds), self.split, dev, test))
        chosen = []
        for number, (begin, end) in enumerate(bounds.tolist()):
            source = self._source_of(data[begin:end]).decode("utf-8", "surrogateescape")
            if split_of(source, dev, test) == self.split:
                chosen.append(number)
        return np.array(chosen, np.int64)

    def _read(self, index: int) -> Pair:
        origins = self._origins(index)
        try:
            lines = [
                files.read(origin.file, origin.offset, size)
                for origin, size in zip(origins, self._sizes[index].tolist(), strict=True)
            ]
        except OSError as error:
            raise BadRecordError(origins[0], error.strerror or str(error)) from error
        return self._pair(lines, origins, self._where(index))

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        first = 0
        for number, paths in enumerate(self._rows):
            data = [files.read(path) for path in paths]
            end = int(np.searchsorted(self._row, number, side="right"))
            begins, sizes = self._begins[first:end].tolist(), self._sizes[first:end].tolist()
            lines = self._line[first:end].tolist()
            for line, begin, size in zip(lines, begins, sizes, strict=True):
                origins = [Origin(path, at) for path, at in zip(paths, begin, strict=True)]
                texts = [
                    one[at : at + count] for one, at, count in zip(data, begin, size, strict=True)
                ]
                record: Any
                try:
                    record = self._pair(texts, origins, f"line {line + 1}: ")
                except BadRecordError as error:
                    record = error
                yield origins[0], record
            first = end

    def _origins(self, index: int) -> list[Origin]:
        begins = self._begins[index].tolist()
        paths = self._rows[self._row[index]]
        return [Origin(path, begin) for path, begin in zip(paths, begins, strict=True)]

    def _where(self, index: int) -> str:
        return f"line {self._line[index] + 1}: "


def _read_text(path: str) -> bytes:
    """Returns the bytes of a file.

    Raises:
      InputError: the file has an encoding with other line ends, such as UTF-16.
    """
    data = files.read(path)
    try:
        check_mark(data)
    except NotTextError as error:
        raise InputError(f"{path} is {error}; convert it to UTF-8") from error
    return data


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
