"""Checks of Params that need no data."""

from __future__ import annotations

from typing import Any


def check_at_least_1(params: Any, *names: str) -> None:
    """Checks fields of Params that are numbers, None, or not set.

    Raises:
      ValueError: one of them is below 1.
    """
    for name in names:
        value = params.get(name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{params.path_of(name)} is {value}, but must be at least 1")
