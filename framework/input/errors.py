"""Errors about the data of an input, which the user can mend."""

from __future__ import annotations


class InputError(ValueError):
    """The data cannot be used; the message says what is wrong and what to do."""


class NoSplitError(InputError):
    """The data has no such split. A `load(split)` raises it for a split that it does not have."""
