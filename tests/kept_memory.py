"""Measures the memory that Python and NumPy keep for an object."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def kept(make: Callable[[], T]) -> tuple[T, int]:
    """Returns what a function makes, and the bytes that it keeps."""
    tracemalloc.start()
    try:
        made = make()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
