"""Names of many files, in little memory."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator

import numpy as np


class PackedNames:
    """Names of files in one byte string; an object of Python for each would need 60 bytes more."""

    def __init__(self, names: Iterable[str]) -> None:
        data, ends = bytearray(), array.array("q")
        for name in names:
            data += name.encode("utf-8", "surrogatepass")
            ends.append(len(data))
        self._data, self._ends = bytes(data), np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        begin = int(self._ends[index - 1]) if index else 0
        return self._data[begin : int(self._ends[index])].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))
