"""Bucketing: batches of examples of similar length, which need little padding.

Each example belongs to a bucket by its length. Each bucket is divided into batches of its own size;
the last batch may not be full. An epoch has every example once, and shuffles the batches of all
buckets. So the number of batches per epoch is fixed, and the batch of any step can be computed
directly.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tekso.framework.input import example_errors, shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, ExampleInput, check_step, clear
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.packing import blocks, compact
from tekso.framework.input.unchanged_examples import check_examples, spread_over
from tekso.framework.signature import Signature

Ints = npt.NDArray[np.int64]

_MOST_SEARCHED = 64  # batches, for one of a short bucket
_MOST_PADDING = 0.25  # of the rows of an epoch: more is worth a warning
_SHORT = 8  # shortest rows by which a loss is checked, if there are longer ones


@dataclasses.dataclass(frozen=True)
class BucketBatch:
    """A batch of one bucket.

    Attributes:
      bucket: index of the bucket.
      examples: [batch size of the bucket] indices; a batch that is not full repeats an example.
      real: [batch size of the bucket] bool; False for repeated examples.
    """

    bucket: int
    examples: Ints
    real: npt.NDArray[np.bool_]


class Buckets:
    """Buckets of examples by length.

    Args:
      lengths: length of each example, at least 1.
      bounds: maximum length of each bucket, ascending; no example may be longer than the last.
      batch_sizes: batch size of each bucket.

    Attributes:
      members: indices of the examples of each bucket.
      batch_sizes: as given.
      num_batches_each: batches per epoch of each bucket.
    Raises:
      ValueError: bounds are not ascending, an example is too long or has length 0, or a batch size
        is below 1.
    """

    def __init__(
        self, lengths: npt.ArrayLike, bounds: Sequence[int], batch_sizes: Sequence[int]
    ) -> None:
        sizes = np.asarray(lengths)
        if not bounds or list(bounds) != sorted(set(bounds)) or bounds[0] < 1:
            raise ValueError(
                f"bounds of buckets must be ascending and at least 1, given {list(bounds)}"
            )
        if len(batch_sizes) != len(bounds) or min(batch_sizes) < 1:
            raise ValueError(
                f"{len(bounds)} buckets need {len(bounds)} batch sizes of at least 1, given "
                f"{list(batch_sizes)}"
            )
        if len(sizes) and sizes.max() > bounds[-1]:
            raise ValueError(example_errors.too_long(sizes, bounds[-1]))
        if len(sizes) and sizes.min() < 1:
            empty = np.flatnonzero(sizes < 1)
            raise ValueError(
                f"{len(empty):,} examples have a length below 1, the first is example {empty[0]}: "
                "leave them out, or pad them and give them the length 1"
            )
        lows = [0, *bounds[:-1]]
        self.members = [_between(sizes, low, high) for low, high in zip(lows, bounds, strict=True)]
        self.batch_sizes = list(batch_sizes)
        self.num_batches_each = [
            -(-len(members) // size)
            for members, size in zip(self.members, self.batch_sizes, strict=True)
        ]
        self._index = JoinedIndex(self.num_batches_each)

    @property
    def num_batches(self) -> int:
        """Number of batches per epoch."""
        return len(self._index)

    @property
    def num_rows(self) -> int:
        """Number of rows of the batches of an epoch, including padding examples."""
        return sum(map(operator.mul, self.num_batches_each, self.batch_sizes))

    @property
    def have_padding(self) -> bool:
        """Whether a batch of an epoch is not full."""
        pairs = zip(self.members, self.batch_sizes, strict=True)
        return any(len(members) % size for members, size in pairs)

    def batch(self, number: int, *, key: shuffle.Words | None) -> BucketBatch:
        """Returns a batch of an epoch.

        Args:
          number: number of the batch, in [0, num_batches).
          key: key of the shuffle of examples and batches; None: sorted by bucket and index.

        Shapes:
          key: [1]
        """
        if key is not None:
            number = int(shuffle.permute(number, self.num_batches, shuffle.fold(key, -1))[0])
        bucket, first = self._index.place(number)
        members = self.members[bucket]
        size = self.batch_sizes[bucket]
        place = np.arange(first * size, (first + 1) * size)
        real = place < len(members)
        place = np.minimum(place, len(members) - 1)
        if key is not None:
            place = shuffle.permute(place, len(members), shuffle.fold(key, bucket))
        return BucketBatch(bucket, members[place].astype(np.int64), real)


def _between(sizes: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[Any]:
    """Returns the indices of the sizes above `low` and up to `high`; int32 if they fit."""
    found = [
        compact(np.flatnonzero((part > low) & (part <= high)) + block.start)
        for block in blocks(len(sizes))
        for part in (sizes[block],)
    ]
    return np.concatenate([np.zeros(0, np.int32), *found])


class BucketedInput(ExampleInput):
    """Base of inputs whose batches are of one bucket each.

        class Rows(BucketedInput):
            def __init__(self, params, **kwargs):
                super().__init__(params, **kwargs)
                self.rows = read_rows(self.params.split)
                self.assign([len(row) for row in self.rows], [32, 64], [16, 8])

            def bucket_rows(self, examples, bound):
                x = np.zeros([len(examples), bound], np.int32)
                for i, example in enumerate(examples):
                    x[i, : len(self.rows[example])] = self.rows[example]
                return {"x": x, "weights": np.ones(len(examples), np.float32)}

    A subclass defines `bucket_rows`, and calls `assign` in its `__init__`. With order "shuffled",
    every epoch shuffles examples and batches; else examples are sorted by bucket. A batch that is
    not full repeats an example, in which the arrays named in `padding_keys` are 0.
    """

    class Params(ExampleInput.Params):
        """Params of BucketedInput."""

    reads_recordings: ClassVar[bool] = False
    """Whether making the input reads recordings, which a plan does not wait for."""

    _assigned: Buckets | None = None

    def assign(
        self, lengths: npt.ArrayLike, bounds: Sequence[int], batch_sizes: Sequence[int]
    ) -> None:
        """Assigns the examples to buckets; see `Buckets` for the arguments and errors."""
        self._bounds = list(bounds)
        self._assigned = Buckets(lengths, bounds, batch_sizes)
        self._bucket_key = shuffle.key_of(self.seed, "buckets")

    def bucket_rows(self, examples: Ints, bound: int) -> Batch:
        """Returns some examples, padded to the bound of their bucket.

        Shapes:
          examples: [n]
          returns: arrays [n, ...]
        """
        raise NotImplementedError(f"{type(self).__name__} has no bucket_rows(examples, bound)")

    @property
    def padded_lengths(self) -> list[int]:
        """The length of the rows of each bucket, ascending."""
        return list(self._bounds)

    def wasted(self) -> str | None:
        """Returns which buckets have fewer examples than a batch, if that wastes many rows.

        None if less than a quarter of the rows of an epoch is padding, or if a subclass or the
        order has other batches.
        """
        if type(self).batch is not BucketedInput.batch or self.params.order != "shuffled":
            return None
        own = self._buckets
        padding = own.num_rows - sum(map(len, own.members))
        if padding < _MOST_PADDING * own.num_rows:
            return None
        few = [
            f"the bucket up to {bound} has {len(members):,} examples and batches of {size:,}"
            for members, bound, size in zip(own.members, self._bounds, own.batch_sizes, strict=True)
            if 0 < len(members) < size
        ]
        if not few:
            return None
        more = f", and {len(few) - 3} more" if len(few) > 3 else ""
        share = f"{padding:,} of the {own.num_rows:,} rows of an epoch"
        return f"{share} are padding of weight 0, because {'; '.join(few[:3])}{more}"

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches that have every example once."""
        return self._buckets.num_batches

    @property
    def _buckets(self) -> Buckets:
        if self._assigned is None:
            raise InputError(
                f"{type(self).__name__} has no buckets: its __init__ must call "
                "self.assign(lengths, bounds, batch_sizes), after super().__init__(params, "
                "**kwargs)"
            )
        return self._assigned

    def describe(self) -> str:
        """Returns a one-line description of the data, with its buckets if no base has a better."""
        found, name = super().describe(), type(self).__name__
        if self._assigned is None or found != name:
            return found
        count = sum(map(len, self._assigned.members))
        bounds = ", ".join(map(str, self._bounds))
        return f"{name}, {self.params.split}: {count:,} examples in buckets up to {bounds}"

    @property
    def num_batches(self) -> int | None:
        """Number of batches in one pass; None if the input is endless."""
        return self._buckets.num_batches if self.params.order == "once" else None

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Shapes:
          returns: as `bucket_rows`; the number of rows and the bound depend on the step's bucket

        Raises:
          IndexError: the step is negative, or beyond the last batch of the pass.
        """
        return self.batch_rows(step, 0, self.num_rows(step))

    def steps_of_each_kind(self) -> list[int]:
        """See `Input`: of the first steps, one whose rows are short, but have a middle."""
        if type(self).batch is not BucketedInput.batch:
            return super().steps_of_each_kind()
        last = _MOST_SEARCHED if self.num_batches is None else self.num_batches

        def length(step: int) -> tuple[bool, int]:
            bound = self._bounds[self.bucket_batch(step).bucket]
            return bound < _SHORT, abs(bound - _SHORT)

        return [min(range(max(1, min(last, _MOST_SEARCHED))), key=length)]

    def largest_batch(self) -> Batch:
        """See `Input`: a batch of the bucket with most elements, of those that have examples."""
        buckets = zip(self._buckets.members, self._bounds, self._buckets.batch_sizes, strict=True)
        found = [(bound * size, bound, size, members) for members, bound, size in buckets]
        _, bound, size, members = max((one for one in found if len(one[3])), key=lambda one: one[0])
        return self.bucket_rows(np.resize(members, size).astype(np.int64), bound)

    def in_two_buckets(self, most: int) -> tuple[Batch, Batch] | None:
        """Returns a few examples, padded to the bound of their bucket and to that of the next one.

        For a check of a model: they are of the shortest rows that have a middle. None if not more
        than one bucket has examples, or if the batches of a subclass are not those of the buckets.

        Args:
          most: maximum number of examples.
        """
        if type(self).batch is not BucketedInput.batch:
            return None
        pairs = zip(self._buckets.members, self._bounds, strict=True)
        used = [(members, bound) for members, bound in pairs if len(members)]
        if len(used) < 2:
            return None
        longer = [place for place, (_, bound) in enumerate(used[:-1]) if bound >= _SHORT]
        place = longer[0] if longer else len(used) - 2
        examples = used[place][0][:most].astype(np.int64)
        one, other = (self._rows_built(examples, bound) for _, bound in used[place : place + 2])
        return one, other

    def bucket_signatures(self) -> list[tuple[float, Signature]]:
        """Returns the share of the batches of an epoch, and the arrays, of each bucket in use.

        For estimates: it builds one row of each bucket. Nothing if the batches of a subclass are
        not those of the buckets.
        """
        if type(self).batch is not BucketedInput.batch:
            return []
        own = self._buckets
        buckets = zip(own.members, self._bounds, own.batch_sizes, own.num_batches_each, strict=True)
        found = []
        for members, bound, size, number in buckets:
            if number:
                row = self._rows_built(members[:1].astype(np.int64), bound)
                arrays = {n: ((size, *array.shape[1:]), array.dtype) for n, array in row.items()}
                found.append((number / own.num_batches, arrays))
        return found

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        return len(self.bucket_batch(step).examples)

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """See `Input`; builds only these rows."""
        check_step(step, self.num_batches)
        chosen = self.bucket_batch(step)
        batch = self._rows_built(chosen.examples[begin:end], self._bounds[chosen.bucket])
        if isinstance(batch, dict):
            self._check_can_be_marked(batch)
            clear(batch, ~chosen.real[begin:end], self.padding_keys)
        return batch

    def _rows_built(self, examples: Ints, bound: int) -> Batch:
        """Returns `bucket_rows(examples, bound)`; an error of it has the examples as a note."""
        method = f"{type(self).__name__}.bucket_rows"
        build = functools.partial(self.bucket_rows, bound=bound)
        found: Batch = example_errors.built(method, build, examples)
        return found

    def _check_can_be_marked(self, batch: Batch) -> None:
        """Checks that a batch has an array that marks padding examples, if a batch has any.

        Raises:
          InputError: it has none.
        """
        if any(key in batch for key in self.padding_keys) or not self._buckets.have_padding:
            return
        raise InputError(
            f"{type(self).__name__} fills batches that are not full up with copies of an example, "
            "but no array marks them, so they would count. Add "
            f"{next(iter(self.padding_keys), 'weights')!r} to the arrays of bucket_rows(), as "
            "np.ones(len(examples), np.float32), and multiply by it in loss_weight and loss of the "
            "task"
        )

    def is_padding(self, step: int) -> npt.NDArray[np.bool_]:
        """See `Input`."""
        return ~self.bucket_batch(step).real

    def excerpt(self) -> list[Batch]:
        """See `ExampleInput`; of every bucket."""
        is_usual = self.params.order == "once" or self.num_batches is None
        if type(self).batch is not BucketedInput.batch or not is_usual:
            return super().excerpt()
        found: list[Batch] = []
        for members, bound in zip(self._buckets.members, self._bounds, strict=True):
            found.append({"num_examples": np.array(len(members))})
            if len(members):
                found.append(self.bucket_rows(members[[0, -1]].astype(np.int64), bound))
        return found

    def check_unchanged(self) -> None:
        """See `Input`: compares four examples of each bucket, unless `batch` is overridden."""
        if self._assigned is None or type(self).batch is not BucketedInput.batch:
            return
        members = self._buckets.members

        def some() -> list[Batch]:
            pairs = zip(members, self._bounds, strict=True)
            return [
                self.bucket_rows(own[spread_over(len(own))].astype(np.int64), bound)
                for own, bound in pairs
                if len(own)
            ]

        check_examples(self, "bucket_rows", [len(own) for own in members], some)

    def at(self, position: Ints) -> Batch:
        """Raises TypeError: the examples have several shapes."""
        raise TypeError(
            f"{type(self).__name__} has rows of several lengths and cannot be part of a mixture"
        )

    def bucket_batch(self, step: int) -> BucketBatch:
        """Returns the bucket and the examples of a step."""
        if not self._buckets.num_batches:
            raise InputError(f"{type(self).__name__}, {self.params.split}: there are no examples")
        epoch, number = divmod(step, self._buckets.num_batches)
        is_shuffled = self.params.order == "shuffled"
        key = shuffle.fold(self._bucket_key, epoch) if is_shuffled else None
        return self._buckets.batch(number, key=key)
