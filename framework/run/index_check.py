"""Checks the sizes in the index of tensor files before TensorFlow allocates what they say.

An index is a table of LevelDB. It ends with a footer, which has the place of the index block; this
block has the places of all other blocks.

    block … block | index block | footer: place of a block, place of the index block, magic number
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekso.framework import bounded, files

_FOOTER_BYTES, _MAGIC = 48, bytes.fromhex("57fb808b247547db")
_TRAILER_BYTES = 5  # after a block: kind of compression, checksum
_LONGEST_VARINT = 10


def check_index(path: str) -> None:
    """Checks that all blocks of an index are within the file.

    Raises:
      ValueError: one is not, or the file is no index.
    """
    data = bounded.read(path)
    size = len(data) - _FOOTER_BYTES
    if size < 0 or not data.endswith(_MAGIC):
        raise ValueError(f"{files.base_name(path)} is not an index of tensors")
    places, at = [], size
    for _ in range(2):
        place, at = _place(data, at)
        places.append(place)
    begin, length = places[1]
    _check_place(begin, length, size)
    _check_place(*places[0], size)
    if data[begin + length] == 0:  # not compressed, as TensorFlow writes it
        for place in _entries(data[begin : begin + length]):
            _check_place(*place, size)


def check_tensors(
    prefix: str, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, Any]
) -> None:
    """Checks that the tensors of an index fit into its data files.

    Raises:
      ValueError: they are larger.
    """
    folder, name = os.path.split(prefix)
    found = [other for other in files.names(folder) if other.startswith(f"{name}.data-")]
    there = sum(files.size_bytes(files.join(folder, other)) for other in found)
    claimed = sum(
        math.prod(shape) * dtypes[key].size
        for key, shape in shapes.items()
        if dtypes[key].is_numpy_compatible and dtypes[key].name != "string"
    )
    if claimed > there:
        raise ValueError(f"its tensors have {claimed:,} bytes, but its data files {there:,}")


def _check_place(begin: int, length: int, size: int) -> None:
    if begin + length + _TRAILER_BYTES > size:
        raise ValueError(f"it has a block of {length:,} bytes, which is not in the file")


def _entries(block: bytes) -> Iterator[tuple[int, int]]:
    """Yields the places that the entries of an index block contain."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    at = 0
    while at < end:
        _, at = _varint(block, at)  # bytes of the key that are the same as in the previous key
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        yield _place(block, at + own)[0]
        at += own + length


def _place(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Returns offset and size of a block, and the offset after them."""
    begin, at = _varint(data, at)
    length, at = _varint(data, at)
    return (begin, length), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number of seven bits per byte, and the offset after it."""
    number = 0
    for i, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, at + i + 1
    raise ValueError("it has a number without an end")
