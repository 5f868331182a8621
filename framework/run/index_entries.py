"""Reads which tensors an index of tensor files has, and where their bytes are, without TensorFlow.

    ""               header: number of data files, order of bytes
    "weights/w"      data type, shape, and either the place of its bytes or a list of its slices
    <slice key>      the place of the bytes of a slice

Sources:
  TensorFlow, tensor_bundle.proto, tensor_shape.proto, tensor_slice.proto and types.proto; the
  encoding of protocol buffers: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tekso.framework import bounded, files
from tekso.framework.run.index_table import entries, slice_key, unmasked, varint
from tekso.framework.run.stored_tensors import (
    StoredPiece,
    TensorInFiles,
    check_tensor,
    numpy_dtype,
    printable,
)

_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64",
    9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16",
    22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip
_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
# Numbers of fields: of the header, of an entry, of a shape, of a dim and of a slice.
_NUM_FILES, _BIG_ENDIAN = 1, 2
_DTYPE, _SHAPE, _FILE, _OFFSET, _SIZE, _CRC32C, _SLICES = 1, 2, 3, 4, 5, 6, 7
_DIM, _DIM_SIZE = 2, 1
_EXTENT, _START, _LENGTH = 1, 1, 2


def read_index(prefix: str) -> tuple[dict[str, TensorInFiles], list[str]]:
    """Reads the index of tensor files.

    Args:
      prefix: path of the files without suffix.

    Returns: the tensors by key, and what is wrong with those that are not among them.

    Raises:
      ValueError: the index is damaged.
      OSError: it cannot be read.
    """
    table = dict(entries(bounded.read(f"{prefix}.index")))
    header = _Message(table.get(b"", b""))
    if header.numbers.get(_BIG_ENDIAN, 0):
        raise ValueError("its tensors are big-endian; Tekso writes little-endian")
    count = header.numbers.get(_NUM_FILES, 0)
    found: dict[str, TensorInFiles] = {}
    problems = []
    for key, value in table.items():
        if key and not key.startswith(b"\0"):  # neither the header nor a slice
            name = key.decode("utf-8", errors="replace")
            try:
                found[name] = _tensor(name, _Message(value), table, prefix, count)
            except ValueError as error:
                problems.append(f"{printable(name)}: {error}")
    return found, problems


class _Message:
    """The fields of a protocol buffer, by number.

    Attributes:
      numbers: the last value of each field that is a number.
      parts: all values of each field that is a text or a message.

    Raises:
      ValueError: it is truncated, or has a field of another kind.
    """

    def __init__(self, data: bytes) -> None:
        self.numbers: dict[int, int] = {}
        self.parts: dict[int, list[bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = varint(data, at)
            field, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                self.numbers[field], at = varint(data, at)
                continue
            if kind == _BYTES:
                size, at = varint(data, at)
            elif kind in _FIXED_BYTES:
                size = _FIXED_BYTES[kind]
            else:
                raise ValueError(f"the index has a field of the unknown kind {kind}")
            part, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("the index has a truncated entry")
            if kind == _BYTES:
                self.parts.setdefault(field, []).append(part)
            else:
                self.numbers[field] = int.from_bytes(part, "little")

    def messages(self, field: int) -> list[_Message]:
        """Returns the messages of a field."""
        return [_Message(part) for part in self.parts.get(field, [])]


def _tensor(
    name: str, entry: _Message, table: Mapping[bytes, bytes], prefix: str, count: int
) -> TensorInFiles:
    number = entry.numbers.get(_DTYPE, 0)
    if number not in _DTYPES:
        raise ValueError(f"it has data type {number} of TensorFlow, which is not numeric")
    dtype = _DTYPES[number]
    dims = [dim for shape in entry.messages(_SHAPE) for dim in shape.messages(_DIM)]
    shape = tuple(dim.numbers.get(_DIM_SIZE, 0) for dim in dims)
    check_tensor(name, shape)

    def piece(about: _Message, start: tuple[int, ...], box: tuple[int, ...]) -> StoredPiece:
        file, size = about.numbers.get(_FILE, 0), about.numbers.get(_SIZE, 0)
        wanted = math.prod(box) * numpy_dtype(dtype).itemsize
        if size != wanted:
            raise ValueError(
                f"the index gives its piece at {list(start)} {size:,} bytes, but {dtype} of shape "
                f"{list(box)} has {wanted:,}"
            )
        if file >= count:
            raise ValueError(f"it is in data file {file}, but the index lists {count} data files")
        path = f"{prefix}.data-{file:05d}-of-{count:05d}"
        crc32c = unmasked(about.numbers.get(_CRC32C, 0))
        return StoredPiece(path, about.numbers.get(_OFFSET, 0), size, start, box, crc32c)

    if _SLICES not in entry.parts:
        return TensorInFiles(name, dtype, shape, (piece(entry, (0,) * len(shape), shape),))
    pieces = []
    for part in entry.messages(_SLICES):
        extents = part.messages(_EXTENT)
        if len(extents) != len(shape):
            raise ValueError(f"it has {len(shape)} dims, but one of its slices has {len(extents)}")
        starts = [extent.numbers.get(_START, 0) for extent in extents]
        lengths = [extent.numbers.get(_LENGTH, -1) for extent in extents]
        if (key := slice_key(name, starts, lengths)) not in table:
            raise ValueError(f"the index lacks its piece at {starts}")
        box = tuple(size if n == -1 else n for n, size in zip(lengths, shape, strict=True))
        pieces.append(piece(_Message(table[key]), tuple(starts), box))
    return TensorInFiles(name, dtype, shape, tuple(pieces))


def data_files(prefix: str) -> dict[str, tuple[int, int]]:
    """Returns {path of a data file: (0, its size in bytes)} of the files that are there.

    Raises:
      OSError: the folder cannot be read.
    """
    folder, name = prefix.rsplit("/", 1)
    paths = [
        files.join(folder, other)
        for other in files.names(folder)
        if other.startswith(f"{name}.data-")
    ]
    return {path: (0, files.size_bytes(path)) for path in paths}
