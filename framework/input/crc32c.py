"""CRC-32C, the checksum of TFRecord files, in NumPy.

The checksum is linear over GF(2): the contribution of a byte depends only on the byte and its
distance from the end. So a block needs one gather from a table [distance, byte] and one xor over
it.

Source: Castagnoli et al. 1993 (polynomial 0x1EDC6F41, here with reflected bits); masking as in the
TFRecord format.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_BLOCK = 1024  # bytes per gather; the table has 1 MiB
_ONES = 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Returns the checksum of some bytes."""
    tables = _tables()
    places = np.arange(_BLOCK)
    state = _ONES
    for begin in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - begin), begin)
        size = len(block)
        added = int(np.bitwise_xor.reduce(tables[size - 1 - places[:size], block]))
        state = _advance(state, size) ^ added
    return state ^ _ONES


def masked(checksum: int) -> int:
    """Returns a checksum as it is stored in TFRecord files."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & _ONES


def masked_of_words(words: np.ndarray) -> np.ndarray:
    """Returns the masked checksums of many 64-bit little-endian words.

    Shapes:
      words: [n] uint64
      returns: [n] uint32
    """
    tables = _tables()
    octets = np.ascontiguousarray(words, "<u8").view(np.uint8).reshape(-1, 8)
    state = np.bitwise_xor.reduce(tables[np.arange(7, -1, -1), octets], axis=1)
    plain = state ^ np.uint32(_advance(_ONES, 8) ^ _ONES)
    rotated = (plain >> np.uint32(15)) | (plain << np.uint32(17))
    return rotated + np.uint32(0xA282EAD8)


def _advance(state: int, size: int) -> int:
    """Returns the state after `size` zero bytes."""
    tables = _tables()
    if size < 4:
        for _ in range(size):
            state = (state >> 8) ^ int(tables[0, state & 0xFF])
        return state
    octets = [(state >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    places = np.arange(size - 1, size - 5, -1)
    return int(np.bitwise_xor.reduce(tables[places, octets]))


@functools.cache
def _tables() -> np.ndarray:
    """Returns the contributions of bytes: [number of bytes that follow, byte] uint32."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> 1) ^ np.uint32(_POLYNOMIAL), first >> 1)
    tables = np.empty((_BLOCK, 256), np.uint32)
    tables[0] = first
    for place in range(1, _BLOCK):
        tables[place] = (tables[place - 1] >> 8) ^ first[tables[place - 1] & 0xFF]
    return tables
