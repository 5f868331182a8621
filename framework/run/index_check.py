"""Checks the sizes in the index of tensor files before TensorFlow allocates what they say.

`index_table.py` describes the format of an index.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.run.index_table import (
    FOOTER_BYTES,
    TRAILER_BYTES,
    BlockPlace,
    block_places,
    read_place,
    varint,
)


def check_index(path: str) -> None:
    """Checks that all blocks of an index are within the file.

    Raises:
      ValueError: one is not, or the file is no index.
    """
    data = bounded.read(path)
    size = len(data) - FOOTER_BYTES
    first, index = block_places(data)
    _check_place(*index, size)
    _check_place(*first, size)
    if data[index.begin + index.length] == 0:  # not compressed, as TensorFlow writes it
        for place in _entries(data[index.begin : index.begin + index.length]):
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
        raise ValueError(f"its tensors have {claimed:,} bytes, but its data files have {there:,}")


def _check_place(begin: int, length: int, size: int) -> None:
    if begin + length + TRAILER_BYTES > size:
        raise ValueError(f"it has a block of {length:,} bytes, which is not in the file")


def _entries(block: bytes) -> Iterator[BlockPlace]:
    """Yields the places that the entries of an index block contain."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    at = 0
    while at < end:
        _, at = varint(block, at)  # bytes of the key that are the same as in the previous key
        own, at = varint(block, at)
        length, at = varint(block, at)
        yield read_place(block, at + own)[0]
        at += own + length
