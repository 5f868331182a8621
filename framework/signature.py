"""The signature of a batch: what an execution needs to know of it before there is data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Signature = Mapping[str, tuple[Sequence[int], Any]]
"""Shape and dtype of every array of a batch, by name."""


def num_examples(signature: Signature) -> int:
    """Returns the number of examples in a batch."""
    return next(iter(signature.values()))[0][0]
