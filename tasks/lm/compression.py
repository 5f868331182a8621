"""Bits per byte of common compressors, for comparison with a language model."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable

_PRESET = 9 | lzma.PRESET_EXTREME
_SMALLEST, _LARGEST = 1 << 12, 1 << 26  # bytes of a dictionary; the largest is that of the preset


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Returns the bits per byte of gzip and xz, at their highest level, on the joined texts.

    Raises:
      ValueError: there is no text.
    """
    data = "".join(texts).encode("utf-8")
    if not data:
        raise ValueError("there is no text to compress")
    # With the dictionary of the preset, xz takes 670 MB for a text of any size.
    size = min(max(_SMALLEST, len(data)), _LARGEST)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": _PRESET, "dict_size": size}]
    return {
        "gzip": 8 * len(gzip.compress(data, 9)) / len(data),
        "xz": 8 * len(lzma.compress(data, filters=filters)) / len(data),
    }
