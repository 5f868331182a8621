"""The signature of a batch: what is known of it before there is data."""

from __future__ import annotations

from typing import Any

Signature = dict[str, tuple[tuple[int, ...], Any]]
"""{name: (shape, dtype)} of the arrays of a batch, or of one example."""


def num_examples(signature: Signature) -> int:
    """Returns the number of examples in a batch."""
    return next(iter(signature.values()))[0][0]
