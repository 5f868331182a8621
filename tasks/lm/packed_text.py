"""Packs several texts into each row, one segment per text."""

from __future__ import annotations

from tekso.framework.input.row_inputs import PackedRows
from tekso.tasks.lm.input import TextInput


class PackedText(PackedRows, TextInput):
    """Packs whole texts into rows of `length`; a longer text is cut into several segments.

    Every token of a text, and its end token, is a label of weight 1 exactly once per epoch.
    """

    class Params(PackedRows.Params, TextInput.Params):
        """Params of PackedText."""
