"""The part of a global batch that a process builds and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Rows = tuple[tuple[int, int], ...]
"""Consecutive examples of a batch, in ascending order: (index of the first, index after the last)
of each range."""

RowsOf = Callable[[int], Rows]
"""Returns the rows of a process, given the number of examples of the global batch."""


class IndivisibleError(ValueError):
    """A batch does not divide over the processes."""


class BatchPart(dict[str, np.ndarray]):
    """The arrays of some rows of a global batch.

    Attributes:
      rows: which examples they are.
      num_examples: number of examples of the global batch.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], rows: Rows, num_examples: int) -> None:
        super().__init__(arrays)
        self.rows, self.num_examples = rows, num_examples

    @staticmethod
    def of(batch: Mapping[str, np.ndarray], rows: Rows) -> BatchPart:
        """Returns rows of a global batch."""
        taken = {
            name: joined([array[begin:end] for begin, end in rows]) for name, array in batch.items()
        }
        return BatchPart(taken, rows, num_rows(batch))


def joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Returns arrays of rows, one after the other."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def num_rows(batch: Mapping[str, np.ndarray]) -> int:
    """Returns the number of examples in the arrays."""
    return len(next(iter(batch.values())))


def example_of(batch: Mapping[str, np.ndarray], row: int) -> int:
    """Returns the index in the global batch of a row of the arrays."""
    if not isinstance(batch, BatchPart):
        return int(row)
    return int(np.concatenate([np.arange(*ends) for ends in batch.rows])[row])


def num_examples(batch: Mapping[str, np.ndarray]) -> int:
    """Returns the number of examples of the global batch."""
    return batch.num_examples if isinstance(batch, BatchPart) else num_rows(batch)


def equal_part(size: int, part: int, parts: int, *, even: bool) -> tuple[int, int]:
    """Returns the range of one of several consecutive parts of a batch, as equal as possible.

    Args:
      size: number of examples of the batch.
      part: index of the part.
      parts: number of parts; the first ones may have one example more.
      even: whether all parts must have the same size.

    Raises:
      IndivisibleError: the batch does not divide into such parts, none of which may be empty.
    """
    shorter, rest = divmod(size, parts)
    if not shorter or (even and rest):
        near = f"it must have at least {parts}"
        if shorter:
            near = f"the nearest numbers that do: {shorter * parts}, {(shorter + 1) * parts}"
        how = "evenly " if even else ""
        raise IndivisibleError(
            f"{size} examples, which do not divide {how}over {parts} processes; {near}"
        )
    begin, end = (i * shorter + min(i, rest) for i in (part, part + 1))
    return begin, end


def part_or_first(size: int, part: int, parts: int) -> tuple[int, int]:
    """Returns the range of one of several consecutive parts, as equal as possible.

    If there are fewer examples than parts, a part without any is the first example, so that it
    computes something; the caller must not count it.
    """
    if size < parts:
        return (part, part + 1) if part < size else (0, 1)
    return equal_part(size, part, parts, even=False)
