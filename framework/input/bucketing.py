"""Bucketing: batches of examples of similar length, which need little padding.

Each example belongs to a bucket by its length. Each bucket is divided into batches of its own size;
the last batch may not be full. An epoch has every example once, and shuffles the batches of all
buckets. So the number of batches per epoch is fixed, and the batch of any step can be computed
directly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.packing import compact

Ints = npt.NDArray[np.int64]


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
      lengths: length of each example.
      bounds: maximum length of each bucket, ascending; no example may be longer than the last.
      batch_sizes: batch size of each bucket.

    Raises:
      ValueError: bounds are not ascending, an example is too long, or a batch size is below 1.
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
            raise ValueError(
                f"an example of length {sizes.max()} is longer than the last bucket, {bounds[-1]}"
            )
        lows = [0, *bounds[:-1]]
        self._members = [
            compact(np.flatnonzero((sizes > low) & (sizes <= high)))
            for low, high in zip(lows, bounds, strict=True)
        ]
        self._batch_sizes = list(batch_sizes)
        counts = [
            -(-len(members) // size)
            for members, size in zip(self._members, self._batch_sizes, strict=True)
        ]
        self._ends = np.cumsum(counts)

    @property
    def num_batches(self) -> int:
        """Number of batches per epoch."""
        return int(self._ends[-1])

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
        bucket = int(np.searchsorted(self._ends, number, side="right"))
        members = self._members[bucket]
        size = self._batch_sizes[bucket]
        first = number - (int(self._ends[bucket - 1]) if bucket else 0)
        place = np.arange(first * size, (first + 1) * size)
        real = place < len(members)
        place = np.minimum(place, len(members) - 1)
        if key is not None:
            place = shuffle.permute(place, len(members), shuffle.fold(key, bucket))
        return BucketBatch(bucket, members[place].astype(np.int64), real)
