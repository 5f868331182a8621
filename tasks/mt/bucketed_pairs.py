"""One pair per row, in batches of similar length."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.bucketing import BucketBatch, Buckets
from tekso.framework.input.input import Batch, check_step, clear
from tekso.framework.params import REQUIRED, param
from tekso.tasks.mt.input import Indices, TranslationInput


class BucketedPairs(TranslationInput):
    """One pair per row, padded to the length of the smallest bucket that fits both sides.

    Each bucket has one batch shape. With order "shuffled", every pair is used once per epoch. Other
    orders keep the order of the data: a batch has the smallest bucket that fits all its pairs.
    """

    class Params(TranslationInput.Params):
        """Params of BucketedPairs."""

        batch_size: int = param(
            "Rows in a batch of the longest bucket; with fill='examples', of every bucket. With "
            "fill='tokens', a batch of shorter rows has more rows, and about the same number of "
            "tokens.",
            default=REQUIRED,
        )
        bounds: list[int] = param(
            "Maximum tokens of either side in each bucket, ascending. The larger of source_length "
            "and target_length is added as the last bucket. Empty: a quarter and a half of it.",
            default=[],
        )
        fill: Literal["examples", "tokens"] = param(
            "examples: a batch of every bucket has batch_size rows. tokens: a batch of the longest "
            "bucket has batch_size rows, a bucket of half that length twice as many, and so on. "
            "Orders other than shuffled always use batch_size.",
            default="examples",
        )

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads, encodes and filters the split.

        Raises:
          InputError: as TranslationInput.
          ValueError: the bounds do not ascend up to the longest length.
        """
        super().__init__(params, **kwargs)
        p = self.params
        longest = max(p.source_length, p.target_length)
        bounds = list(p.bounds) or [size for size in (longest // 4, longest // 2) if size]
        self._bounds = [*(bound for bound in bounds if bound < longest), longest]
        rows = [
            p.batch_size * (longest // bound if p.fill == "tokens" and bound > 0 else 1)
            for bound in self._bounds
        ]
        self._sizes = np.maximum(
            self.rows.source_lengths(self._stream), self.rows.target_lengths(self._stream)
        )
        self._buckets = Buckets(self._sizes, self._bounds, rows)
        self._key = shuffle.key_of(self.seed, "buckets")

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Shapes:
          returns: as in the docstring of tasks/mt/input.py; B, S and T depend on the step's bucket

        Raises:
          IndexError: the step is negative, or beyond the last batch of the pass.
        """
        return self.batch_rows(step, 0, self.num_rows(step))

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        if self.params.order == "shuffled":
            return len(self._chosen(step).examples)
        size: int = self.params.batch_size
        return size

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """See `Input`; builds only these rows."""
        check_step(step, self.num_batches)
        some = slice(begin, end)
        if self.params.order != "shuffled":
            return self._in_order(step, some)
        chosen = self._chosen(step)
        return self._rows(chosen.examples[some], ~chosen.real[some], self._bounds[chosen.bucket])

    def is_padding(self, step: int) -> npt.NDArray[np.bool_]:
        """See `Input`."""
        if self.params.order == "shuffled":
            return ~self._chosen(step).real
        return (self.params.order == "once") & (self._places(step) >= self.num_examples)

    def at(self, position: Indices) -> Batch:
        """Raises TypeError: the examples have several shapes."""
        raise TypeError("BucketedPairs has rows of several lengths and cannot be part of a mixture")

    def _chosen(self, step: int) -> BucketBatch:
        epoch, number = divmod(step, self._buckets.num_batches)
        return self._buckets.batch(number, key=shuffle.fold(self._key, epoch))

    def _places(self, step: int) -> Indices:
        size = self.params.batch_size
        return np.arange(step * size, (step + 1) * size)

    def _in_order(self, step: int, some: slice) -> Batch:
        place, count = self._places(step), self.num_examples
        examples = np.minimum(place, count - 1) if self.params.order == "once" else place % count
        bucket = int(np.searchsorted(self._bounds, self._sizes[examples].max()))
        return self._rows(examples[some], self.is_padding(step)[some], self._bounds[bucket])

    def _rows(self, examples: Indices, is_padding: np.ndarray, bound: int) -> Batch:
        p = self.params
        batch = self.rows.one_a_row(
            self._stream[examples], min(bound, p.source_length), min(bound, p.target_length)
        )
        clear(batch, is_padding, self.padding_keys)
        return batch
