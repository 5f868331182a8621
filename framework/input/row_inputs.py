"""Inputs whose examples are rows of tokens: one example per row, bucketed by length, or packed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import Batch, ExampleInput, Signature
from tekso.framework.input.packing import (
    Ints,
    Packing,
    PlacedExamples,
    one_a_row,
    pack_sides,
)
from tekso.framework.input.sides import Side, SideForm, longest
from tekso.framework.params import REQUIRED, param


class RowInput(ExampleInput):
    """One example per row, on one or several sides; `sides` describes the arrays of a batch.

    A subclass defines `forms` and `sides`, and `complete` if a batch has further arrays.

    Attributes:
      marks: which of the arrays "segment_ids" and "positions" the batches have.
    """

    class Params(ExampleInput.Params):
        """Params of RowInput."""

        cache_dir: str = param(
            "Folder for the tokens of large corpora, which several runs may share. Empty: the "
            "folder `assets` of the logdir.",
            default="",
        )

    marks: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def forms(cls, params: Any) -> tuple[SideForm, ...]:
        """Returns the form of each side."""
        raise NotImplementedError(f"{cls.__name__} has no forms(params)")

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides of all examples of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no property sides")

    def complete(self, batch: Batch) -> None:
        """Adds arrays to a batch that are computed from those of its sides."""

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        found: Signature = {}
        for form in cls.forms(params):
            found.update(form.signature(params.batch_size, cls.marks))
        return found

    @property
    def num_examples(self) -> int:
        """Number of rows in an epoch."""
        return len(self.sides[0].spans)

    def examples(self, index: Ints, epoch: Ints) -> Batch:
        """Returns the rows with the given indices.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of sides.py
        """
        del epoch
        return self.rows(one_a_row(index), len(index))

    def rows(self, placed: PlacedExamples, num_rows: int, *, bound: int | None = None) -> Batch:
        """Returns rows with examples.

        Args:
          placed: the examples and their rows.
          num_rows: number of rows.
          bound: most tokens in a row; None: no more limit than the length of each side.
        """
        batch: Batch = {}
        for side in self.sides:
            length = min(side.form.length, bound or side.form.length)
            side.put(batch, placed, (num_rows, length), self.marks)
        self.complete(batch)
        return batch


class BucketedRows(BucketedInput, RowInput):
    """One example per row, padded to the length of the smallest bucket that fits all its sides.

    Each bucket has one batch shape. Every example is used once per epoch. With an order other than
    "shuffled", examples are sorted by bucket.
    """

    class Params(BucketedInput.Params, RowInput.Params):
        """Params of BucketedRows."""

        batch_size: int = param(
            "Rows in a batch of the longest bucket; with fill='examples', of every bucket. With "
            "fill='tokens', a batch of shorter rows has more rows, and about the same number of "
            "tokens.",
            default=REQUIRED,
        )
        bounds: list[int] = param(
            "Maximum tokens of any side in each bucket, ascending. The length of the longest side "
            "is added as the last bucket, and larger bounds are ignored. Empty: a quarter and a "
            "half of this length.",
            default=[],
        )
        fill: Literal["examples", "tokens"] = param(
            "examples: a batch of every bucket has batch_size rows. tokens: a batch of the longest "
            "bucket has batch_size rows, a bucket of half that length twice as many, and so on.",
            default="examples",
        )

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads and encodes the split, and assigns its examples to buckets.

        Raises:
          InputError: as the base class.
          ValueError: the bounds do not ascend.
        """
        super().__init__(params, **kwargs)
        p = self.params
        length = max(side.form.length for side in self.sides)
        bounds = list(p.bounds) or [size for size in (length // 4, length // 2) if size]
        bounds = [*(bound for bound in bounds if bound < length), length]
        rows = [
            p.batch_size * (length // bound if p.fill == "tokens" and bound > 0 else 1)
            for bound in bounds
        ]
        self.assign(longest(self.sides), bounds, rows)

    def bucket_rows(self, examples: Ints, bound: int) -> Batch:
        """See `BucketedInput`.

        Shapes:
          returns: as in the docstring of sides.py; the length is the bound
        """
        return self.rows(one_a_row(examples), len(examples), bound=bound)


class PackedRows(RowInput):
    """Packs several examples into each row, one segment per example on every side.

    Examples are assigned to rows once. With order "shuffled", every epoch shuffles the rows.
    """

    class Params(RowInput.Params):
        """Params of PackedRows."""

    marks: ClassVar[tuple[str, ...]] = ("segment_ids", "positions")

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads, encodes and packs the split.

        Raises:
          InputError: as the base class.
        """
        super().__init__(params, **kwargs)
        self._packing = self._pack(
            [side.lengths() for side in self.sides], [side.form.length for side in self.sides]
        )

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return self._packing.num_rows

    def examples(self, index: Ints, epoch: Ints) -> Batch:
        """Returns the rows with the given indices.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of sides.py
        """
        del epoch
        return self.rows(self._packing.in_rows(index), len(index))

    def _pack(self, lengths: list[npt.NDArray[Any]], capacities: list[int]) -> Packing:
        return pack_sides(lengths, capacities, key=shuffle.key_of(self.seed, "packing"))
