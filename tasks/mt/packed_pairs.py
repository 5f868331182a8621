"""Packs several pairs into each row, one segment per pair on both sides."""

from __future__ import annotations

from typing import Any

from tekso.framework.input import shuffle
from tekso.framework.input.input import Batch, Signature
from tekso.tasks.mt.input import Indices, TranslationInput
from tekso.tasks.mt.pair_packing import pack_in_order, pack_pairs


class PackedPairs(TranslationInput):
    """Packs several pairs into each row: their sources on the source side, targets on the other.

    With order "shuffled", pairs are assigned to rows once, and every epoch shuffles the rows. Other
    orders keep the order of the data: a row is filled with the next pairs while both sides fit.
    """

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads, encodes, filters and packs the split.

        Raises:
          InputError: as TranslationInput.
        """
        super().__init__(params, **kwargs)
        p = self.params
        lengths = self.rows.source_lengths(self._stream), self.rows.target_lengths(self._stream)
        capacities = p.source_length, p.target_length
        if p.order == "shuffled":
            key = shuffle.key_of(self.seed, "packing")
            self._packing = pack_pairs(lengths, capacities, key=key)
        else:
            self._packing = pack_in_order(lengths, capacities)

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        own = super().signature(params) or {}
        return {
            **own,
            "source_positions": own["source_ids"],
            "target_positions": own["target_ids"],
        }

    @property
    def num_examples(self) -> int:
        """Number of rows."""
        return self._packing.num_rows

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Returns the rows with the given indices.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of tasks/mt/input.py
        """
        del epoch
        pairs = self._packing.in_rows(index)
        numbers = self._stream[pairs.examples]
        return self.rows.side_by_side(
            numbers,
            pairs.row,
            pairs.number + 1,
            columns=(
                pairs.columns(self.rows.source_lengths(numbers)),
                pairs.columns(self.rows.target_lengths(numbers)),
            ),
            shape=(len(index), self.params.source_length, self.params.target_length),
        )
