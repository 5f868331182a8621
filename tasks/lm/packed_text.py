"""Packs several texts into each row, one segment per text."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input import shuffle
from tekso.framework.input.input import Batch, Signature
from tekso.framework.input.packing import count_up, cut, pack
from tekso.tasks.lm.input import Indices, TextInput, tokens_of


class PackedText(TextInput):
    """Packs whole texts into rows of `length`; a longer text is cut into several segments.

    Every token of a text, and its end token, is a label of weight 1 exactly once per epoch.
    """

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads, encodes and packs the split.

        Raises:
          InputError: as TextInput.
        """
        super().__init__(params, **kwargs)
        ends = self.text.ends
        self._pieces = cut(ends[:-1], np.diff(ends), self.params.length)
        self._packing = pack(
            self._pieces.lengths, self.params.length, key=shuffle.key_of(self.seed, "packing")
        )

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        ids = tokens_of(params)["ids"]
        return {**(super().signature(params) or {}), "segment_ids": ids, "positions": ids}

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return self._packing.num_rows

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Returns the rows with the given indices.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of tasks/lm/input.py
        """
        del epoch
        segments = self._packing.in_rows(index)
        sizes = self._pieces.lengths[segments.examples]
        within = count_up(sizes)  # position of each token in its segment
        place = np.repeat(segments.row, sizes), np.repeat(segments.columns(sizes), sizes) + within
        source = np.repeat(self._pieces.starts[segments.examples], sizes) + within
        shape = (len(index), self.params.length)
        batch = {
            "ids": np.full(shape, self.tokenizer.end_id, np.int32),
            "labels": np.full(shape, self.tokenizer.end_id, np.int32),
            "weights": np.zeros(shape, np.float32),
            "segment_ids": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
        }
        batch["ids"][place] = self.text.tokens[source]
        batch["labels"][place] = self.text.tokens[source + 1]
        batch["weights"][place] = 1.0
        batch["segment_ids"][place] = np.repeat(segments.number + 1, sizes)
        batch["positions"][place] = within
        self.count_bytes(batch)
        return batch
