"""Sources whose records are byte ranges of text files: parts of files, or lines.

The files are read block by block, and never held in memory. Per file with a record, 24 bytes are
kept; per line, about 2 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.line_index import ChangedError, Chosen, LineIndex, check_no_nul
from tekso.framework.input.line_records import LineRecords
from tekso.framework.input.skips import BadRecordError, Origin, Skips, reason_of
from tekso.framework.input.sources import Digest, Source, TextPiece, digest
from tekso.framework.input.text import NotTextError, to_text
from tekso.framework.input.text_scan import TextScan

_BLOCK = 1 << 16  # lines
PIECE = 1 << 18  # bytes; longer records are divided. SentencePiece needs about 100 times as much

Range = tuple[int, int]
"""First byte of a record in its file, and the byte after its last."""


class TextRanges(Source):
    """Base class of sources of text files; the constructor of a subclass sets `texts`.

    Attributes:
      texts: the records.
    """

    texts: Texts

    def __len__(self) -> int:
        return len(self.texts)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return self.texts.origin(index)

    def fingerprint(self) -> str:
        """Returns a digest of the records."""
        return self.texts.fingerprint()

    def pieces(self) -> Iterator[TextPiece]:
        """See `Source`."""
        for piece in self.texts.pieces(longest=PIECE):
            if isinstance(piece.record, BadRecordError):
                self.skips.add(piece.record.origin, piece.record.reason)
            else:
                yield piece

    @property
    def num_files(self) -> int:
        """Number of files with records in this split."""
        return self.texts.num_files

    @property
    def num_bytes(self) -> int:
        """Total size of all records."""
        return self.texts.num_bytes

    def _read(self, index: int) -> str:
        try:
            return self.texts.read(index)
        except OSError as error:
            raise BadRecordError(self.origin(index), reason_of(error)) from error

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        for piece in self.texts.pieces(longest=None):
            yield piece.origin, piece.record


class Texts(Protocol):
    """The records of a source of text files."""

    def __len__(self) -> int:
        """Number of records."""

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""

    def fingerprint(self) -> str:
        """Returns a digest of the records."""

    def read(self, index: int) -> str:
        """Returns a record.

        Raises:
          BadRecordError: it is not text.
          OSError: its file cannot be read.
        """

    def pieces(self, *, longest: int | None) -> Iterator[TextPiece]:
        """Yields all records; one that cannot be read is a BadRecordError.

        Args:
          longest: size in bytes above which a record is divided; None: none is divided.
        """

    @property
    def num_files(self) -> int:
        """Number of files with records."""

    @property
    def num_bytes(self) -> int:
        """Total size of all records."""


class FileTexts:
    """One record per file: the file, or a part of it."""

    def __init__(self, found: Sequence[tuple[str, bytes, Range]]) -> None:
        self._paths = [path for path, _, _ in found]
        self._digests = [content for _, content, _ in found]
        self._bounds = np.array([bounds for _, _, bounds in found], np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._paths)

    def origin(self, index: int) -> Origin:
        """See `Texts`."""
        return Origin(self._paths[index], int(self._bounds[index, 0]))

    def fingerprint(self) -> str:
        """See `Texts`."""
        number = np.arange(len(self), dtype=np.int64)
        return digest([*self._digests, number.tobytes(), self._bounds.tobytes()])

    def read(self, index: int) -> str:
        """See `Texts`."""
        begin, end = self._bounds[index].tolist()
        origin = self.origin(index)
        return _text(files.read(origin.file, begin, end - begin), origin)

    def pieces(self, *, longest: int | None) -> Iterator[TextPiece]:
        """See `Texts`; pieces end with a line end, so a line of any length is in one piece."""
        for index, (begin, end) in enumerate(self._bounds.tolist()):
            if longest is not None and end - begin > longest:
                yield from _pieces(self._paths[index], begin, end)
                continue
            record: Any
            try:
                record = self.read(index)
            except OSError as error:
                record = BadRecordError(self.origin(index), reason_of(error))
            except BadRecordError as error:
                record = error
            yield TextPiece(self.origin(index), record)

    @property
    def num_files(self) -> int:
        """See `Texts`."""
        return len(self)

    @property
    def num_bytes(self) -> int:
        """See `Texts`."""
        return int((self._bounds[:, 1] - self._bounds[:, 0]).sum())


class LineTexts:
    """One record per line."""

    def __init__(self, records: LineRecords) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def origin(self, index: int) -> Origin:
        """See `Texts`."""
        line = self._records[index]
        return Origin(line.paths[0], line.offsets[0])

    def fingerprint(self) -> str:
        """See `Texts`."""
        total = Digest()
        counts = [count for count in self._records.counts if count]
        for content, count in zip(self._records.digests, self._records.counts, strict=True):
            if count:
                total.add(content)
        total.begin(8 * len(self))  # the number of the file of each line
        for number, count in enumerate(counts):
            for begin in range(0, count, _BLOCK):
                block = np.full(min(_BLOCK, count - begin), number, np.int64)
                total.update(block.tobytes())
        total.begin(16 * len(self))
        for _, lines, chosen in self._records.blocks():
            total.update((lines.bounds[0][chosen] + lines.offsets[0]).tobytes())
        return total.hexdigest()

    def read(self, index: int) -> str:
        """See `Texts`."""
        line = self._records[index]
        return _text(line.data[0], Origin(line.paths[0], line.offsets[0]))

    def pieces(self, *, longest: int | None) -> Iterator[TextPiece]:
        """See `Texts`; a line is never divided."""
        del longest
        for line in self._records:
            origin = Origin(line.paths[0], line.offsets[0])
            record: Any
            try:
                record = _text(line.data[0], origin)
            except BadRecordError as error:
                record = error
            yield TextPiece(origin, record)

    @property
    def num_files(self) -> int:
        """See `Texts`."""
        return sum(count > 0 for count in self._records.counts)

    @property
    def num_bytes(self) -> int:
        """See `Texts`."""
        blocks = self._records.blocks()
        return sum(int(np.diff(lines.bounds[0][chosen]).sum()) for _, lines, chosen in blocks)


def file_texts(
    paths: Sequence[str],
    range_of: Callable[[str], tuple[TextScan, Range | None]],
    *,
    skips: Skips,
) -> FileTexts:
    """Reads files once and returns the parts of them that are records.

    Args:
      paths: the files; those that are not text are skipped.
      range_of: scans a file and returns its part in the split; None: no part of it.
      skips: counts the skipped files.

    Raises:
      InputError: too many files are not text, or no records are left.
    """
    found = []
    for path in paths:
        with _skipping(path, skips):
            scan, bounds = range_of(path)
            if bounds is not None:
                found.append((path, scan.digest, bounds))
    if not found:
        raise skips.nothing_left()
    return FileTexts(found)


def line_texts(
    paths: Sequence[str], choose: Callable[[str, LineIndex], Chosen], *, skips: Skips
) -> LineTexts:
    """Reads files once and returns those of their lines that are records.

    Args:
      paths: the files; those that are not text are skipped. Blank lines are left out.
      choose: returns the lines of a file in the split.
      skips: counts the skipped files.

    Raises:
      InputError: too many files are not text, or no records are left.
    """
    rows, indices, chosen = [], [], []
    for path in paths:
        with _skipping(path, skips):
            index = LineIndex([path], skip_blank=True, check=check_no_nul)
            if not files.size_bytes(path):
                raise NotTextError("empty")
            rows.append((path,))
            indices.append(index)
            chosen.append(choose(path, index))
    records = LineRecords(rows, indices, chosen)
    if not len(records):
        raise skips.nothing_left()
    return LineTexts(records)


@contextlib.contextmanager
def _skipping(path: str, skips: Skips) -> Iterator[None]:
    """Counts a file as skipped if it turns out in the block that it cannot be used."""
    try:
        yield
    except NotTextError as error:
        skips.add(Origin(path, error.offset), str(error))
    except OSError as error:
        skips.add(Origin(path), reason_of(error))


def _pieces(path: str, begin: int, end: int) -> Iterator[TextPiece]:
    """Yields a long record in pieces that end with a line end."""
    rest: list[bytes] = []  # a line that has no end yet
    at = begin
    try:
        with files.open(path) as file:
            file.seek(begin)
            while at < end and (block := file.read(min(PIECE, end - at))):
                at += len(block)
                cut = len(block) if at == end else block.rfind(b"\n") + 1
                rest.append(block[:cut])
                if cut:
                    data = b"".join(rest)
                    offset = at - len(block) + cut - len(data)
                    yield TextPiece(Origin(path, offset), to_text(data), is_last=at == end)
                    rest = []
                rest.append(block[cut:])
        if at < end:
            raise ChangedError(path)
    except (NotTextError, OSError) as error:
        raise InputError(f"{path} was text when it was opened, but now: {error}") from error


def _text(data: bytes, origin: Origin) -> str:
    try:
        return to_text(data)
    except NotTextError as error:
        raise BadRecordError(origin.at(error.offset), str(error)) from error
