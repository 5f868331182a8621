"""One index over several parts, such as the records of several files."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable


class JoinedIndex:
    """Numbers the records of several parts from 0, one part after the other.

    Args:
      sizes: number of records of each part; a part may be empty.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> tuple[int, int]:
        """Returns the number of a record's part, and its index in the part.

        Args:
          index: the index of the record, in [0, len).
        """
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)
