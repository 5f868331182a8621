"""Checks of Params that need no data."""

from __future__ import annotations

from typing import Any

_LARGEST = 2**31 - 1


def check_counts(params: Any, *names: str) -> None:
    """Checks fields of Params that are numbers, None, or not set.

    Raises:
      ValueError: one of them is below 1, or above 2**31 - 1.
    """
    for name in names:
        value = params.get(name)
        if isinstance(value, int) and not 1 <= value <= _LARGEST:
            bound = "least 1" if value < 1 else f"most {_LARGEST:,}"
            raise ValueError(f"{params.path_of(name)} is {value}, but must be at {bound}")
