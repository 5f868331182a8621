"""Text files as a source: a record is a file or a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.input.skips import BadRecordError, InputError, Origin
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.splits import Split, check_fractions, files_param, part, split_of
from tekso.framework.input.text import NotTextError, byte_order_mark_size, to_text
from tekso.framework.params import param


class TextRanges(Source):
    """Base class of sources whose records are byte ranges of text files.

    The constructor of a subclass calls `_index`, which reads every file once and skips files that
    are not text. A subclass defines `_ranges`.
    """

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Creates the source without files."""
        super().__init__(params, split=split)
        self._paths: list[str] = []
        self._digests: list[bytes] = []
        self._file = np.zeros(0, np.int64)  # index of the file of each record
        self._bounds = np.zeros((0, 2), np.int64)  # [begin, end) of each record in its file

    def __len__(self) -> int:
        return len(self._bounds)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._paths[self._file[index]], int(self._bounds[index, 0]))

    def fingerprint(self) -> str:
        """Returns a digest of the records."""
        return digest([*self._digests, self._file.tobytes(), self._bounds.tobytes()])

    @property
    def num_files(self) -> int:
        """Number of files with records in this split."""
        return len(np.unique(self._file))

    @property
    def num_bytes(self) -> int:
        """Total size of all records."""
        return int((self._bounds[:, 1] - self._bounds[:, 0]).sum())

    def _index(self, paths: Sequence[str]) -> None:
        """Reads all files, and finds the records in each with `_ranges`.

        Raises:
          InputError: too many files are not text, or no records are left.
        """
        all_bounds: list[np.ndarray] = []
        for path in paths:
            try:
                data = files.read(path)
                bounds = self._ranges(path, data)
            except NotTextError as error:
                self.skips.add(Origin(path, error.offset), str(error))
                continue
            except OSError as error:
                self.skips.add(Origin(path), error.strerror or str(error))
                continue
            if len(bounds):
                self._paths.append(path)
                self._digests.append(bytes.fromhex(digest([data])))
                all_bounds.append(bounds)
        if not all_bounds:
            raise self.skips.nothing_left()
        self._bounds = np.concatenate(all_bounds)
        self._file = np.repeat(np.arange(len(all_bounds)), [len(bounds) for bounds in all_bounds])

    def _ranges(self, path: str, data: bytes) -> np.ndarray:
        """Returns the records of this split in a file.

        Shapes:
          returns: [records, 2] int64: first byte, and the byte after the last

        Raises:
          NotTextError: the file is not text.
        """
        raise NotImplementedError

    def _read(self, index: int) -> str:
        begin, end = self._bounds[index].tolist()
        origin = self.origin(index)
        try:
            return _text(files.read(origin.file, begin, end - begin), origin)
        except OSError as error:
            raise BadRecordError(origin, error.strerror or str(error)) from error

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        last, data = -1, b""
        for index in range(len(self)):
            origin = self.origin(index)
            record: Any
            try:
                if self._file[index] != last:
                    data = files.read(origin.file)
                    last = self._file[index]
                begin, end = self._bounds[index].tolist()
                record = _text(data[begin:end], origin)
            except OSError as error:
                record = BadRecordError(origin, error.strerror or str(error))
            except BadRecordError as error:
                record = error
            yield origin, record


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
        self._dev, self._test = choice.dev_fraction, choice.test_fraction
        self._index(choice.paths)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"text files {self.params.get(files_param(self.params, self.split))}"

    def _ranges(self, path: str, data: bytes) -> np.ndarray:
        if self.params.unit == "line":
            if b"\0" in data or not data:
                to_text(data)  # raises the error
            lines = line_bounds(data)
            lines = lines[lines[:, 1] > lines[:, 0]]
            return lines[self._chosen(path, len(lines))]
        begin = byte_order_mark_size(data)
        text = to_text(data).removeprefix("\ufeff")
        if self.params.holdout == "hash":
            chosen = split_of(files.base_name(path), self._dev, self._test) == self.split
            return np.array([[begin, len(data)]] if chosen else [], np.int64).reshape(-1, 2)
        first, last = part(len(text), self.split, self._dev, self._test)
        if first == last:
            return np.zeros((0, 2), np.int64)
        begin += len(text[:first].encode("utf-8"))
        return np.array([[begin, begin + len(text[first:last].encode("utf-8"))]], np.int64)

    def _chosen(self, path: str, num_lines: int) -> slice | np.ndarray:
        if self.params.holdout == "end":
            return slice(*part(num_lines, self.split, self._dev, self._test))
        name = files.base_name(path)
        splits = (split_of(f"{name}:{i}", self._dev, self._test) for i in range(num_lines))
        return np.fromiter((split == self.split for split in splits), bool, num_lines)


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
    def of(params: Any, split: Split) -> FileChoice:
        """Reads files, dev_files, test_files, dev_fraction and test_fraction of the Params.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no files are given, or the split has no data.
          ValueError: a fraction is out of range.
        """
        own = {"train": "", "dev": params.dev_files, "test": params.test_files}
        if not params.files and not own[split]:
            raise InputError(
                f"{params.path_of('files')} is empty: set the files to read, for example --set "
                "input.files='texts/*.txt'"
            )
        check_fractions(params)
        if own[split]:
            name = params.path_of(f"{split}_files")
            return FileChoice(files.glob(own[split], what=name), *_all_of(split))
        dev = 0.0 if params.dev_files else params.dev_fraction
        test = 0.0 if params.test_files else params.test_fraction
        if {"train": 1.0, "dev": dev, "test": test}[split] == 0.0:
            raise InputError(
                f"there is no {split} text: set {params.path_of(f'{split}_files')}, or "
                f"{split}_fraction above 0"
            )
        return FileChoice(files.glob(params.files, what=params.path_of("files")), dev, test)


def _all_of(split: Split) -> tuple[float, float]:
    """Returns the fractions (dev, test) for which whole files belong to a split."""
    return (1.0 if split == "dev" else 0.0), (1.0 if split == "test" else 0.0)


def line_bounds(data: bytes) -> np.ndarray:
    """Returns the first byte of every line and the byte after its last: [lines, 2] int64.

    Blank lines are included. A line ends with LF or CR LF, which is optional in the last line.
    """
    begin = byte_order_mark_size(data)
    if len(data) == begin:
        return np.zeros((0, 2), np.int64)
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == ord("\n"))
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    begins = np.concatenate([[begin], ends[:-1] + 1])
    before = array[np.maximum(ends - 1, 0)]
    ends = ends - ((before == ord("\r")) & (ends > begins))
    return np.stack([begins, ends], axis=1).astype(np.int64)


def _text(data: bytes, origin: Origin) -> str:
    try:
        return to_text(data)
    except NotTextError as error:
        raise BadRecordError(Origin(origin.file, origin.offset + error.offset), str(error)) from (
            error
        )
