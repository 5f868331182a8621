"""Pairs one a row, in batches of similar length."""

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
    """A pair a row, filled up to the bounds of its bucket, which both of its sides fit into.

    Batches have as many shapes as there are buckets. In training every pair is taken once an epoch.
    Other orders keep that of the data: a batch is in the bucket that all of its pairs fit into.
    """

    class Params(TranslationInput.Params):
        """Params of BucketedPairs."""

        batch_size: int = param(
            "Rows in a batch of the longest bucket, and of every bucket with fill='examples'. "
            "fill='tokens': a batch of shorter rows has more, about as many tokens as the longest.",
            default=REQUIRED,
        )
        bounds: list[int] = param(
            "Most tokens of either side in each bucket, ascending; the last bucket is for the "
            "larger one of source_length and target_length. Empty: a quarter and half of it.",
            default=[],
        )
        fill: Literal["examples", "tokens"] = param(
            "examples: batch_size rows in a batch of every bucket. tokens: that of the longest; "
            "twice as many rows where they are at most half as long, and so on; where batches are "
            "shuffled.",
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
        """The global batch of a step.

        Shapes:
          returns: as in the docstring of tasks/mt/input.py, B, S and T those of the step's bucket

        Raises:
          IndexError: the step is negative, or the pass has fewer batches.
        """
        check_step(step, self.num_batches)
        if self.params.order != "shuffled":
            return self._in_order(step)
        chosen = self._chosen(step)
        return self._rows(chosen.examples, ~chosen.real, self._bounds[chosen.bucket])

    def is_padding(self, step: int) -> npt.NDArray[np.bool_]:
        """See `Input`."""
        if self.params.order == "shuffled":
            return ~self._chosen(step).real
        return (self.params.order == "once") & (self._places(step) >= self.num_examples)

    def at(self, position: Indices) -> Batch:
        """Refuses: there are no examples of one shape."""
        raise TypeError("BucketedPairs has rows of several lengths and cannot be part of a mixture")

    def _chosen(self, step: int) -> BucketBatch:
        epoch, number = divmod(step, self._buckets.num_batches)
        return self._buckets.batch(number, key=shuffle.fold(self._key, epoch))

    def _places(self, step: int) -> Indices:
        size = self.params.batch_size
        return np.arange(step * size, (step + 1) * size)

    def _in_order(self, step: int) -> Batch:
        place, count = self._places(step), self.num_examples
        examples = np.minimum(place, count - 1) if self.params.order == "once" else place % count
        bucket = int(np.searchsorted(self._bounds, self._sizes[examples].max()))
        return self._rows(examples, self.is_padding(step), self._bounds[bucket])

    def _rows(self, examples: Indices, is_padding: np.ndarray, bound: int) -> Batch:
        p = self.params
        batch = self.rows.one_a_row(
            self._stream[examples], min(bound, p.source_length), min(bound, p.target_length)
        )
        clear(batch, is_padding, self.padding_keys)
        return batch
