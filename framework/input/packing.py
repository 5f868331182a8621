"""Packing: examples of unequal lengths side by side in rows of one length.

    row 0   [ a a a a a | d d | f ]
    row 1   [ b b b b | e e e | · ]      · is padding

Examples are packed longest first, each into the fullest row with enough space (best-fit decreasing,
within 22 % of the minimum number of rows; Johnson 1973). The algorithm works on the number of
examples of each length instead of single examples, so it takes about as long for millions as for
thousands. Examples are packed once, and each epoch shuffles the rows.

Whatever has one number per example is computed in blocks, so packing needs 8 bytes per example and
16 per row beside the lengths.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle

Ints = npt.NDArray[np.int64]

BLOCK = 1 << 16  # examples that are handled together


@dataclasses.dataclass(frozen=True)
class Packing:
    """The examples in each row.

    Attributes:
      examples: [examples] indices of examples, row after row; int32 if they fit.
      row_starts: [rows + 1], int32 if they fit; the examples of row r are
        examples[row_starts[r]:row_starts[r + 1]].
    """

    examples: npt.NDArray[Any]
    row_starts: npt.NDArray[Any]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_starts) - 1

    def row(self, index: int) -> npt.NDArray[Any]:
        """Returns the examples of a row."""
        return self.examples[self.row_starts[index] : self.row_starts[index + 1]]

    def in_rows(self, rows: Ints) -> PlacedExamples:
        """Returns the examples of some rows with their positions, row after row.

        Shapes:
          rows: [n]
        """
        counts = self.row_starts[rows + 1] - self.row_starts[rows]
        number = count_up(counts)
        row = np.repeat(np.arange(len(rows)), counts)
        examples = self.examples[np.repeat(self.row_starts[rows], counts) + number]
        return PlacedExamples(
            examples.astype(np.int64), row, number, (np.cumsum(counts) - counts)[row]
        )


@dataclasses.dataclass(frozen=True)
class PlacedExamples:
    """Examples with their positions in rows.

    Attributes:
      examples: [m] index of each example.
      row: [m] number of its row, among the requested rows.
      number: [m] position among the examples of its row, from 0.
      first: [m] index in these arrays of the first example of its row.
    """

    examples: Ints
    row: Ints
    number: Ints
    first: Ints

    def columns(self, sizes: Ints) -> Ints:
        """Returns the column at which each example begins in its row.

        Shapes:
          sizes: [m], lengths of the examples
          returns: [m]
        """
        before = np.cumsum(sizes) - sizes
        return before - before[self.first]


def one_a_row(examples: Ints) -> PlacedExamples:
    """Returns examples with their positions if each has a row of its own.

    Shapes:
      examples: [n]
    """
    rows = np.arange(len(examples))
    return PlacedExamples(examples, row=rows, number=np.zeros_like(rows), first=rows)


def pack_sides(
    lengths: Sequence[npt.NDArray[Any]], capacities: Sequence[int], *, key: shuffle.Words
) -> Packing:
    """Packs examples of several sides into few rows, so that all sides of every row fit.

        source   [ a a a | b b b b | c c ]
        target   [ a a | b b b b | c c c ]

    An example counts by the largest share of a row that one of its sides takes.

    Args:
      lengths: for each side, the length of each example, at most the length of a row.
      capacities: for each side, the length of a row.
      key: key of the shuffle of examples of equal length.

    Shapes:
      lengths: [examples] each
      key: [1]
    """
    whole = max(capacities)
    if len(lengths) == 1:
        return pack(lengths[0], whole, key=key)
    shares = np.empty(len(lengths[0]), np.int32)
    for block in blocks(len(shares)):
        shares[block] = functools.reduce(
            np.maximum,
            (
                -(-np.asarray(sizes[block], np.int64) * whole // capacity)
                for sizes, capacity in zip(lengths, capacities, strict=True)
            ),
        )
    return pack(shares, whole, key=key)


def pack_in_order(lengths: Sequence[npt.NDArray[Any]], capacities: Sequence[int]) -> Packing:
    """Packs examples in the given order; a new row begins when the next example does not fit.

    Args:
      lengths: for each side, the length of each example, at most the length of a row.
      capacities: for each side, the length of a row.

    Shapes:
      lengths: [examples] each
    """
    starts = [0]
    used = [0] * len(capacities)
    for number, sizes in enumerate(zip(*(side.tolist() for side in lengths), strict=True)):
        used = [before + size for before, size in zip(used, sizes, strict=True)]
        if any(size > capacity for size, capacity in zip(used, capacities, strict=True)):
            starts.append(number)
            used = list(sizes)
    count = len(lengths[0])
    return Packing(np.arange(count), np.array([*starts, count], np.int64))


def pack(lengths: npt.ArrayLike, capacity: int, *, key: shuffle.Words) -> Packing:
    """Packs examples into rows by best-fit decreasing.

    Args:
      lengths: length of each example.
      capacity: length of a row.
      key: key of the shuffle of examples of equal length.

    Shapes:
      lengths: [examples], each in [1, capacity]
      key: [1]

    Raises:
      ValueError: a length is out of range.
    """
    sizes = compact(np.asarray(lengths))
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= capacity:
        raise ValueError(
            f"lengths from {sizes.min()} to {sizes.max()} do not all fit into [1, {capacity}]"
        )
    counts = np.zeros(capacity + 1, np.int64)
    for block in blocks(len(sizes)):
        counts += np.bincount(sizes[block], minlength=capacity + 1)
    by_length = _sorted(sizes, counts, key)
    next_of = np.concatenate([[0], np.cumsum(counts)])  # of each length: its first in by_length
    examples, place = np.empty_like(by_length), 0
    row_sizes: list[tuple[int, int]] = []  # examples in a row, and number of such rows
    for pattern, count in _plan(counts, capacity):
        columns = []
        for length, times in pattern:
            begin = next_of[length]
            next_of[length] += times * count
            columns.append(by_length[begin : begin + times * count].reshape(count, times))
        size = sum(times for _, times in pattern)
        rows = examples[place : place + count * size].reshape(count, size)
        np.concatenate(columns, axis=1, out=rows)
        place += count * size
        row_sizes.append((size, count))
    each = np.array([(0, 1), *row_sizes], np.int64)
    return Packing(examples, compact(np.cumsum(np.repeat(each[:, 0], each[:, 1]))))


def blocks(count: int) -> Iterator[slice]:
    """Yields slices of BLOCK numbers, and a last one of what is left."""
    for begin in range(0, count, BLOCK):
        yield slice(begin, min(begin + BLOCK, count))


def compact(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns integers, none of them negative, as int32 if they fit: plans have one per example."""
    fits = not len(numbers) or int(numbers.max()) < 1 << 31
    return numbers.astype(np.int32 if fits else np.int64, copy=False)


def _sorted(sizes: npt.NDArray[Any], counts: Ints, key: shuffle.Words) -> npt.NDArray[Any]:
    """Returns the examples sorted by size, and shuffled among those of equal size.

    Args:
      sizes: [examples] size of each example.
      counts: number of examples of each size.
      key: key of the shuffle.
    """
    count = len(sizes)
    found = np.empty(count, np.int32 if count < 1 << 31 else np.int64)
    place_of = np.cumsum(counts) - counts  # of the next example of each size
    for block in blocks(count):
        examples = shuffle.permute_back(np.arange(block.start, block.stop), count, key)
        keys = sizes[examples]
        order = np.argsort(keys, kind="stable")
        of_block = np.bincount(keys, minlength=len(counts))
        before = np.cumsum(of_block) - of_block
        keys = keys[order]
        found[place_of[keys] + np.arange(len(keys)) - before[keys]] = examples[order]
        place_of += of_block
    return found


Pattern = tuple[tuple[int, int], ...]  # (length, number of examples of this length) in a row


def _plan(counts: Ints, capacity: int) -> list[tuple[Pattern, int]]:
    """Returns the pattern of each kind of row, and the number of rows of this kind."""
    kinds: dict[int, list[tuple[Pattern, int]]] = {}  # by free space in a row
    free: list[int] = []  # the keys of `kinds`, sorted

    def add(room: int, pattern: Pattern, count: int) -> None:
        if count and room not in kinds:
            bisect.insort(free, room)
            kinds[room] = []
        if count:
            kinds[room].append((pattern, count))

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            place = bisect.bisect_left(free, length)
            if place < len(free):
                room = free[place]
                pattern, count = kinds[room].pop()
                if not kinds[room]:
                    del kinds[room], free[place]
            else:
                room, pattern, count = capacity, (), left  # new rows, at most `left`
            times = room // length
            rows = min(count, left // times)
            left -= rows * times
            add(room - times * length, (*pattern, (length, times)), rows)
            count -= rows
            if count and left and left < times:
                add(room - left * length, (*pattern, (length, left)), 1)
                left, count = 0, count - 1
            if pattern:
                add(room, pattern, count)
    return [kind for room in free for kind in kinds[room]]


@dataclasses.dataclass(frozen=True)
class Spans:
    """Parts of an array of tokens.

    Attributes:
      starts: [spans] index of the first token of each span.
      lengths: [spans] number of tokens of each span.
    """

    starts: Ints
    lengths: Ints


def count_up(counts: Ints) -> Ints:
    """Returns 0, 1, …, counts[0] - 1, 0, 1, …, counts[1] - 1, and so on."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
