"""Columns: long arrays of numbers, in memory or in a file, which are read by ranges.

A file is read by position (`pread`) instead of being mapped into memory: a mapping counts as
address space (`ulimit -v`), a read does not. Processes of one host that read the same file share
its pages in the page cache, as with a mapping.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input.errors import InputError

BLOCK = 1 << 17  # numbers that are read together


class Column:
    """Numbers in memory.

    Attributes:
      dtype: dtype of the numbers.
    """

    def __init__(self, numbers: npt.ArrayLike) -> None:
        self._numbers = np.asarray(numbers)
        self.dtype = self._numbers.dtype

    def __len__(self) -> int:
        return len(self._numbers)

    def ranges(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> np.ndarray:
        """Returns the numbers of several ranges, one after the other.

        Shapes:
          starts: [n], index of the first number of each range
          sizes: [n], number of numbers in each range
          returns: [sum of sizes]

        Raises:
          IndexError: a range is not in the column.
        """
        self._check(starts, sizes)
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        found: np.ndarray = self._numbers[np.repeat(starts, sizes) + within]
        return found

    def take(self, index: npt.NDArray[np.int64]) -> np.ndarray:
        """Returns the numbers with the given indices.

        Shapes:
          index: [n], each in [0, length of the column)
          returns: [n]

        Raises:
          IndexError: an index is not in the column.
        """
        return self.ranges(index, np.ones(len(index), np.int64))

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all numbers in order, in arrays of at most `BLOCK` numbers."""
        for begin in range(0, len(self), BLOCK):
            size = min(BLOCK, len(self) - begin)
            yield self.ranges(np.array([begin]), np.array([size]))

    def read(self) -> np.ndarray:
        """Returns all numbers as one array."""
        return self.ranges(np.array([0]), np.array([len(self)]))

    def _check(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        if len(starts) and (starts.min() < 0 or (starts + sizes).max() > len(self)):
            raise IndexError(
                f"the ranges from {starts.min()} to {(starts + sizes).max()} are not in a column "
                f"of {len(self)} numbers"
            )


class FileColumn(Column):
    """Numbers in a local file, which is opened once; several threads may read.

    Args:
      path: the file.
      dtype: dtype of the numbers.
      length: number of numbers in the file.

    Raises:
      OSError: the file cannot be opened.
    """

    def __init__(self, path: str, dtype: Any, length: int) -> None:
        self.dtype = np.dtype(dtype)
        self._path = path
        self._length = length
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # At the end of the program, a thread may still read.
        weakref.finalize(self, os.close, self._file).atexit = False

    def __len__(self) -> int:
        return self._length

    def ranges(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> np.ndarray:
        """See `Column`.

        Raises:
          InputError: the file has become shorter since it was opened.
        """
        self._check(starts, sizes)
        found = np.empty(int(sizes.sum()), self.dtype)
        view, place, width = found.view(np.uint8).data, 0, self.dtype.itemsize
        for start, size in zip((starts * width).tolist(), (sizes * width).tolist(), strict=True):
            end = start + size
            while start < end:  # one call reads at most 2 GB
                count = os.preadv(self._file, [view[place : place + end - start]], start)
                if not count:
                    raise InputError(f"{self._path} has become shorter: start the program again")
                start, place = start + count, place + count
        return found
