"""One text per row, in batches of similar length."""

from __future__ import annotations

from tekso.framework.input.row_inputs import BucketedRows
from tekso.tasks.lm.input import TextInput


class BucketedText(BucketedRows, TextInput):
    """One text per row, padded to the length of its bucket; long texts are cut into several rows.

    Each bucket has one batch shape. Every text is used once per epoch.
    """

    class Params(BucketedRows.Params, TextInput.Params):
        """Params of BucketedText."""
