"""One pair per row, in batches of similar length."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input.bucketing import BucketBatch, BucketedInput
from tekso.framework.input.row_inputs import BucketedRows
from tekso.framework.input.sides import longest
from tekso.framework.signature import Signature
from tekso.tasks.mt.input import TranslationInput


class BucketedPairs(BucketedRows, TranslationInput):
    """One pair per row, padded to the length of the smallest bucket that fits both sides.

    Each bucket has one batch shape. With order "shuffled", every pair is used once per epoch. Other
    orders keep the order of the data: a batch has batch_size rows, whatever `fill` is, and the
    smallest bucket that fits all its pairs.
    """

    class Params(BucketedRows.Params, TranslationInput.Params):
        """Params of BucketedPairs."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads, encodes and filters the split, and assigns its pairs to buckets.

        Raises:
          InputError: as TranslationInput.
          ValueError: the bounds do not ascend.
        """
        super().__init__(params, **kwargs)
        if self.params.order != "shuffled":
            self._lengths = longest(self.sides)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in one pass; None if the input is endless."""
        return super(BucketedInput, self).num_batches

    def bucket_signatures(self) -> list[tuple[float, Signature]]:
        """See `BucketedInput`: nothing if the order is that of the data."""
        return super().bucket_signatures() if self.params.order == "shuffled" else []

    def bucket_batch(self, step: int) -> BucketBatch:
        """See `BucketedInput`."""
        if self.params.order == "shuffled":
            return super().bucket_batch(step)
        size, count = self.params.batch_size, self.num_examples
        place = np.arange(step * size, (step + 1) * size)
        is_padding = (self.params.order == "once") & (place >= count)
        pairs = np.where(is_padding, count - 1, place % count)
        bucket = int(np.searchsorted(self._bounds, self._lengths[pairs].max()))
        return BucketBatch(bucket, pairs, ~is_padding)
