"""Pairs packed side by side into rows, each a segment of both sides."""

from __future__ import annotations

from typing import Any

from tekso.framework.input import shuffle
from tekso.framework.input.input import Batch, Signature
from tekso.tasks.mt.input import Indices, TranslationInput
from tekso.tasks.mt.pair_packing import pack_in_order, pack_pairs


class PackedPairs(TranslationInput):
    """Several pairs a row: sources side by side on the source side, targets on the target side.

    What lies in which row is planned once; an epoch shuffles rows. Other orders keep that of the
    data: a row takes the pairs that come next, as long as both sides fit.
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
        """Rows."""
        return self._packing.num_rows

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Some rows.

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
