"""Texts packed side by side into rows, each a segment of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input import shuffle
from tekso.framework.input.input import Batch, Signature
from tekso.framework.input.packing import count_up, cut, pack
from tekso.tasks.lm.input import Indices, TextInput, tokens_of


class PackedText(TextInput):
    """Whole texts, packed into rows of `length`; a longer one is cut into several segments.

    Every token of a text, and its end, is a label of weight 1 exactly once an epoch.
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
        """Rows."""
        return self._packing.num_rows

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Some rows.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of tasks/lm/input.py
        """
        del epoch
        starts = self._packing.row_starts
        counts = starts[index + 1] - starts[index]  # segments of each row
        number = count_up(counts)  # of each segment: its place in its row
        piece = self._packing.examples[np.repeat(starts[index], counts) + number]
        sizes = self._pieces.lengths[piece]
        row = np.repeat(np.arange(len(index)), counts)
        before = np.cumsum(sizes) - sizes
        column = before - before[np.cumsum(counts) - counts][row]  # where a segment begins

        within = count_up(sizes)  # of each token: its place in its segment
        place = np.repeat(row, sizes), np.repeat(column, sizes) + within
        source = np.repeat(self._pieces.starts[piece], sizes) + within
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
        batch["segment_ids"][place] = np.repeat(number + 1, sizes)
        batch["positions"][place] = within
        self.count_bytes(batch)
        return batch
