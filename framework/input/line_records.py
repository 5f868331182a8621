"""Records that are lines of text files, or of parallel text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.line_index import GROUP, Chosen, LineIndex, Lines

_BLOCK = 1 << 16  # lines


class LineRecord(NamedTuple):
    """A line of each of some parallel files.

    Attributes:
      paths: the files.
      number: number of the line, from 0.
      offsets: first byte of the line in each file.
      data: the line in each file, without its end.
    """

    paths: tuple[str, ...]
    number: int
    offsets: tuple[int, ...]
    data: tuple[bytes, ...]


class LineRecords:
    """The chosen lines of several files, or of several tuples of parallel files.

    Args:
      rows: the files of each index.
      indices: the lines of the files.
      chosen: the lines that are records.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, ...]],
        indices: Sequence[LineIndex],
        chosen: Sequence[Chosen],
    ) -> None:
        self._rows, self._indices, self._chosen = list(rows), list(indices), list(chosen)
        self._index = JoinedIndex(self.counts)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> LineRecord:
        """Returns a record.

        Raises:
          OSError: a file cannot be read, or has changed.
        """
        row, within = self._index.place(index)
        number = self._chosen[row].number(within)
        return next(self._of(row, self._indices[row].group(number // GROUP), [number % GROUP]))

    def __iter__(self) -> Iterator[LineRecord]:
        """Yields all records in order.

        Raises:
          OSError: a file cannot be read, or has changed.
        """
        for row, chosen in enumerate(self._chosen):
            if not len(chosen):
                continue
            for lines in self._indices[row].blocks():
                yield from self._of(row, lines, chosen.among(lines.first, len(lines)).tolist())

    def blocks(self) -> Iterator[tuple[int, Lines, np.ndarray]]:
        """Yields (index of the files, lines, numbers of the chosen ones among them)."""
        for row, chosen in enumerate(self._chosen):
            for lines in self._indices[row].blocks():
                yield row, lines, chosen.among(lines.first, len(lines))

    def numbers(self) -> Iterator[np.ndarray]:
        """Yields the numbers of the chosen lines in their files, in many arrays."""
        for index, chosen in zip(self._indices, self._chosen, strict=True):
            for begin in range(0, len(index), _BLOCK):
                yield chosen.among(begin, min(_BLOCK, len(index) - begin)) + begin

    @property
    def counts(self) -> list[int]:
        """Number of records of each index."""
        return [len(one) for one in self._chosen]

    @property
    def digests(self) -> list[bytes]:
        """Digests of the files of each index."""
        return [index.digest for index in self._indices]

    def _of(self, row: int, lines: Lines, numbers: Sequence[int]) -> Iterator[LineRecord]:
        paths = self._rows[row]
        if len(paths) == 1:  # saves a third of the time
            data, offset = lines.data[0], lines.offsets[0]
            bounds = lines.bounds[0][numbers].tolist()
            for number, (begin, end) in zip(numbers, bounds, strict=True):
                line = (data[begin:end],)
                yield LineRecord(paths, lines.first + number, (offset + begin,), line)
            return
        bounds = np.stack([one[numbers] for one in lines.bounds], axis=1).tolist()
        for number, places in zip(numbers, bounds, strict=True):
            found = zip(lines.data, places, strict=True)
            yield LineRecord(
                paths,
                lines.first + number,
                tuple(a + begin for a, (begin, _) in zip(lines.offsets, places, strict=True)),
                tuple(data[begin:end] for data, (begin, end) in found),
            )
