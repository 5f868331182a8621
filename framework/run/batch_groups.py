"""Groups consecutive batches of one shape, for several training steps in one call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tekso.framework.execution.base import signature_of

Batch = Mapping[str, np.ndarray]
Batches = Callable[[int], Iterator[Batch]]
"""Returns an iterator over the batches, starting at a number."""


class BatchGroups:
    """Takes batches from an iterator: one, or a whole group.

    Groups have one size, since a program compiles its loop over a group for each size.

    Args:
      batches: the batches.
      size: number of batches in a group.
    """

    def __init__(self, batches: Iterator[Batch], size: int) -> None:
        self._batches, self._size = batches, size
        self._ahead: collections.deque[Batch] = collections.deque()

    def take(self, most: int) -> list[Batch]:
        """Returns a group, or else the next batch alone; [] at the end of the batches.

        Args:
          most: maximum number of batches to return.
        """
        self._read(self._size if most >= self._size else 1)
        ahead = list(self._ahead)[: self._size]
        is_group = most >= self._size == len(ahead) and len({shapes(b) for b in ahead}) == 1
        return [
            self._ahead.popleft() for _ in range(len(ahead) if is_group else min(1, len(ahead)))
        ]

    def _read(self, count: int) -> None:
        """Reads ahead to a number of batches, but not beyond one of another shape."""
        while len(self._ahead) < count:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._ahead.append(batch)
            if shapes(batch) != shapes(self._ahead[0]):
                return

    def close(self) -> None:
        """Closes the iterator."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def shapes(batch: Batch) -> frozenset[Any]:
    """Returns the names and shapes of a batch's arrays, for comparison."""
    return frozenset((name, shape) for name, (shape, _) in signature_of(batch).items())


def described(batches: list[Batch]) -> str:
    """Returns a description of the batches of a call: "batches of 8 x 32"."""
    size = " x ".join(map(str, next(iter(signature_of(batches[0]).values()))[0]))
    several = f"{len(batches)} steps a call, " if len(batches) > 1 else ""
    return f"{several}batches of {size}"
