"""One text per row, in batches of similar length."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.bucketing import BucketBatch, Buckets
from tekso.framework.input.input import Batch, check_step, clear
from tekso.framework.input.packing import cut
from tekso.framework.params import REQUIRED, param
from tekso.tasks.lm.input import Indices, TextInput


class BucketedText(TextInput):
    """One text per row, padded to the length of its bucket; long texts are cut into several rows.

    Each bucket has one batch shape. Every text is used once per epoch.
    """

    class Params(TextInput.Params):
        """Params of BucketedText."""

        batch_size: int = param(
            "Rows in a batch of the longest bucket; with fill='examples', of every bucket. With "
            "fill='tokens', a batch of shorter rows has more rows, and about the same number of "
            "tokens.",
            default=REQUIRED,
        )
        bounds: list[int] = param(
            "Maximum length of each bucket, ascending and below `length`; `length` itself is added "
            "as the last. Empty: a quarter and a half of `length`.",
            default=[],
        )
        fill: Literal["examples", "tokens"] = param(
            "examples: a batch of every bucket has batch_size rows. tokens: a batch of the longest "
            "bucket has batch_size rows, a bucket of half that length twice as many, and so on.",
            default="examples",
        )

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads and encodes the split.

        Raises:
          InputError: as TextInput.
          ValueError: the bounds do not ascend up to the length.
        """
        super().__init__(params, **kwargs)
        p = self.params
        bounds = list(p.bounds) or [size for size in (p.length // 4, p.length // 2) if size]
        self._bounds = sorted({*bounds, p.length}) if not p.bounds else [*bounds, p.length]
        rows = [
            p.batch_size * (p.length // bound if p.fill == "tokens" else 1)
            for bound in self._bounds
        ]
        ends = self.text.ends
        self._pieces = cut(ends[:-1], np.diff(ends), p.length)
        self._buckets = Buckets(self._pieces.lengths, self._bounds, rows)
        self._key = shuffle.key_of(self.seed, "buckets")

    @property
    def num_examples(self) -> int:
        """Number of rows in an epoch, without padding rows."""
        return len(self._pieces.lengths)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in one pass; None if the input is endless."""
        return self._buckets.num_batches if self.params.order == "once" else None

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Shapes:
          returns: as in the docstring of tasks/lm/input.py; B and L depend on the step's bucket

        Raises:
          IndexError: the step is negative, or beyond the last batch of the pass.
        """
        return self.batch_rows(step, 0, self.num_rows(step))

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        return len(self._chosen(step).examples)

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """See `Input`; builds only these rows."""
        check_step(step, self.num_batches)
        chosen = self._chosen(step)
        batch = self._rows(chosen.examples[begin:end], self._bounds[chosen.bucket])
        clear(batch, ~chosen.real[begin:end], self.padding_keys)
        return batch

    def is_padding(self, step: int) -> npt.NDArray[np.bool_]:
        """See `Input`."""
        return ~self._chosen(step).real

    def at(self, position: npt.NDArray[np.int64]) -> Batch:
        """Raises TypeError: the examples have several shapes."""
        raise TypeError("BucketedText has rows of several lengths and cannot be part of a mixture")

    def _chosen(self, step: int) -> BucketBatch:
        epoch, number = divmod(step, self._buckets.num_batches)
        key = shuffle.fold(self._key, epoch) if self.params.order == "shuffled" else None
        return self._buckets.batch(number, key=key)

    def _rows(self, index: Indices, length: int) -> Batch:
        place = np.arange(length)
        real = place < self._pieces.lengths[index][:, None]
        source = np.where(real, self._pieces.starts[index][:, None] + place, 0)
        end = self.tokenizer.end_id
        batch = {
            "ids": np.where(real, self.text.tokens[source], end).astype(np.int32),
            "labels": np.where(real, self.text.tokens[source + 1], end).astype(np.int32),
            "weights": real.astype(np.float32),
        }
        self.count_bytes(batch)
        return batch
