"""Reads the index of tensor files, a table of LevelDB, without TensorFlow.

A table is a sequence of blocks. It ends with a footer, which has the place of the index block; this
block has the places of all data blocks.

    block … block | index block | footer: place of a block, place of the index block, magic number
    block: entries, restart points | kind of compression, checksum

Sources:
  LevelDB, doc/table_format.md, and ordered_code.cc of TensorFlow for the keys of slices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c

FOOTER_BYTES, MAGIC = 48, bytes.fromhex("57fb808b247547db")
TRAILER_BYTES = 5  # after a block: kind of compression, checksum
_LONGEST_VARINT = 10
_LONGEST_KEY = 1 << 16  # bytes
_MASK_DELTA = 0xA282EAD8


class BlockPlace(NamedTuple):
    """The place of a block in a table.

    Attributes:
      begin: offset of its first byte.
      length: number of bytes, without the trailer.
    """

    begin: int
    length: int


def entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, after comparing the checksum of each block.

    Raises:
      ValueError: the table is truncated or damaged, or compressed.
    """
    _, index = block_places(table)
    for _, value in _block_entries(_block(table, index)):
        yield from _block_entries(_block(table, read_place(value, 0)[0]))


def block_places(table: bytes) -> tuple[BlockPlace, BlockPlace]:
    """Returns the places of the two blocks that the footer names; the second is the index block.

    Raises:
      ValueError: the bytes are no table.
    """
    at = len(table) - FOOTER_BYTES
    if at < 0 or not table.endswith(MAGIC):
        raise ValueError("it is not an index of tensors")
    first, at = read_place(table, at)
    return first, read_place(table, at)[0]


def read_place(data: bytes, at: int) -> tuple[BlockPlace, int]:
    """Returns the place of a block that is written at an offset, and the offset after it."""
    begin, at = varint(data, at)
    length, at = varint(data, at)
    return BlockPlace(begin, length), at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number of seven bits per byte, and the offset after it.

    Raises:
      ValueError: the number has no end.
    """
    number = 0
    for i, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, at + i + 1
    raise ValueError("it has an integer that does not end")


def unmasked(checksum: int) -> int:
    """Returns the CRC-32C of which a table or a tensor file contains the masked form."""
    rotated = (checksum - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def slice_key(name: str, starts: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Returns the key under which the index has a slice of a tensor; length -1: the whole dim."""
    text = re.sub(rb"[\x00\xff]", lambda m: m[0] + bytes([0xFF - m[0][0]]), name.encode())
    key = _increasing(0) + text + b"\x00\x01" + _increasing(len(starts))
    for start, length in zip(starts, lengths, strict=True):
        key += _signed_increasing(start) + _signed_increasing(length)
    return key


def _block(table: bytes, place: BlockPlace) -> bytes:
    end = place.begin + place.length
    if end + TRAILER_BYTES > len(table):
        raise ValueError(f"it has a block of {place.length:,} bytes, which is not in the file")
    wanted = unmasked(int.from_bytes(table[end + 1 : end + TRAILER_BYTES], "little"))
    if google_crc32c.value(table[place.begin : end + 1]) != wanted:
        raise ValueError("the bytes of the index have changed (CRC-32C differs)")
    if table[end] != 0:
        raise ValueError("it is compressed; Tekso and TensorFlow write it without compression")
    return table[place.begin : end]


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    at, key = 0, b""
    while at < end:
        shared, at = varint(block, at)  # bytes of the key that are the same as in the previous key
        own, at = varint(block, at)
        length, at = varint(block, at)
        if max(shared, own) > _LONGEST_KEY or at + own + length > end:
            raise ValueError("it has an entry or a key that is too long")
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + length]
        at += length


def _increasing(number: int) -> bytes:
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _signed_increasing(number: int) -> bytes:
    """Encodes a number so that the order of the bytes is that of the numbers."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    # The first bits are `size` ones and a zero, if the number is not negative; else, the opposite.
    header = ((1 << size) - 1) << (7 * size)
    return ((number & ((1 << 8 * size) - 1)) ^ header).to_bytes(size, "big")
