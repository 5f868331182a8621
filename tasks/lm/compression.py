"""Bits per byte of common compressors, for comparison with a language model."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Returns the bits per byte of gzip and xz, at their highest level, on the joined texts.

    Raises:
      ValueError: there is no text.
    """
    data = "".join(texts).encode("utf-8")
    if not data:
        raise ValueError("there is no text to compress")
    return {
        "gzip": 8 * len(gzip.compress(data, 9)) / len(data),
        "xz": 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data),
    }
