"""Packs several pairs into each row, one segment per pair on both sides."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from tekso.framework.input.packing import Packing, pack_in_order
from tekso.framework.input.row_inputs import PackedRows
from tekso.tasks.mt.input import TranslationInput


class PackedPairs(PackedRows, TranslationInput):
    """Packs several pairs into each row: their sources on the source side, targets on the other.

    With order "shuffled", pairs are assigned to rows once, and every epoch shuffles the rows. Other
    orders keep the order of the data: a row is filled with the next pairs while both sides fit.
    """

    class Params(PackedRows.Params, TranslationInput.Params):
        """Params of PackedPairs."""

    marks = PackedRows.marks

    def _pack(self, lengths: list[npt.NDArray[Any]], capacities: list[int]) -> Packing:
        if self.params.order == "shuffled":
            return super()._pack(lengths, capacities)
        return pack_in_order(lengths, capacities)
