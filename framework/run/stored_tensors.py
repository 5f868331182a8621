"""Reads tensors in files without TensorFlow, chunk by chunk, whatever pieces they are stored in.

    w [6, 5]   file 0: rows 0 to 2 | file 1: rows 3 to 5       two pieces, of two processes
    chunks(w)  elements 0 to 9, 10 to 19, 20 to 29             row-major, of the whole tensor

A chunk is a box of the tensor that is contiguous in row-major order. In every piece that it
overlaps, the common part is contiguous too, and the parts of a piece are read from its beginning to
its end. So its checksum is computed on the way, and memory is bounded by a chunk.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import google_crc32c
import numpy as np

from tekso.framework import files
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError, first_line

CHUNK_ELEMENTS = 1 << 20
_MOST_OPEN_FILES = 16
_MOST_DIMS, _MOST_ELEMENTS = 32, 1 << 48  # of NumPy, which has at most 63 bits for bytes
_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_OF_NUMPY = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip
FLOATING = ("float16", "float32", "float64", *_OF_ML_DTYPES)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size of a part of a tensor, for every dim."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, and where its bytes are.

    Attributes:
      file: path of the file.
      offset: of the first byte in the file.
      length: number of bytes.
      start: position of the box in the tensor.
      shape: of the box.
      crc32c: of the bytes; None: unknown.
    """

    file: str
    offset: int
    length: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    crc32c: int | None = None


@dataclass(frozen=True)
class TensorInFiles:
    """A tensor in files.

    Attributes:
      key: its name.
      dtype: name of the type.
      shape: of the whole tensor.
      pieces: boxes that cover the tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the files."""
        return sum(piece.length for piece in self.pieces)

    @property
    def is_floating(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.dtype in FLOATING


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns a data type by its name; also those that NumPy itself does not have.

    Raises:
      ValueError: there is no such type of numbers.
    """
    if name in _OF_ML_DTYPES:
        import ml_dtypes  # slower to import than NumPy's own

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    if name in _OF_NUMPY:
        return np.dtype(name)
    raise ValueError(f"{name} is not a numeric type that can be read")


def check_tensor(name: str, shape: Sequence[int]) -> None:
    """Checks what a file says of a tensor, before anything is computed from it.

    Raises:
      ValueError: a terminal would not print the name as it is, or NumPy has no such shape.
    """
    if not name.isprintable():
        raise ValueError("its name has characters that cannot be printed")
    if len(shape) > _MOST_DIMS or math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
        raise ValueError(f"it has the impossible shape {str(list(shape[:4]))[:-1]}, …]")


def printable(name: str) -> str:
    """Returns a name with escape sequences instead of characters that cannot be printed."""
    return name if name.isprintable() else ascii(name)


def boxes(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Yields boxes of at most `most` elements that cover a tensor in row-major order."""

    def split(start: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Box]:
        if math.prod(size) <= max(most, 1):
            yield start, size
            return
        dim = next(d for d, length in enumerate(size) if length > 1)
        step = max(1, most // math.prod(size[dim + 1 :]))
        for begin in range(0, size[dim], step):
            inner = min(step, size[dim] - begin)
            yield from split(
                (*start[:dim], begin, *start[dim + 1 :]), (*size[:dim], inner, *size[dim + 1 :])
            )

    return split((0,) * len(shape), tuple(shape))


class TensorReader:
    """Reads tensors; keeps their files open until `close`, or until the end of a `with` block."""

    def __init__(self) -> None:
        self._opened: collections.OrderedDict[str, IO[bytes]] = collections.OrderedDict()

    def __enter__(self) -> TensorReader:
        """Returns the reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the files."""
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._opened:
            self._opened.popitem()[1].close()

    def chunks(self, tensor: TensorInFiles, most: int | None = None) -> Iterator[np.ndarray]:
        """Yields the elements of a tensor in row-major order, as flat arrays of its type.

        Args:
          tensor: the tensor.
          most: maximum number of elements of a chunk; None: CHUNK_ELEMENTS.

        Raises:
          DamagedCheckpointError: bytes have changed, or cannot be read. The last chunk of a piece
            was yielded before its checksum is compared.
        """
        dtype = numpy_dtype(tensor.dtype)
        done: dict[StoredPiece, tuple[int, int]] = {}  # bytes read of a piece, and their checksum
        for start, size in boxes(tensor.shape, most or CHUNK_ELEMENTS):
            out = np.empty(size, dtype)
            for piece in tensor.pieces:
                self._fill(out, start, tensor, piece, done)
            yield out.reshape(-1)
        for piece in tensor.pieces:
            length, crc32c = done.get(piece, (0, 0))
            if length != piece.length or piece.crc32c not in (None, crc32c):
                raise DamagedCheckpointError(
                    f"{tensor.key} cannot be read: the bytes of {piece.file} have changed (CRC-32C "
                    "differs)"
                )

    def read(self, tensor: TensorInFiles) -> np.ndarray:
        """Returns a whole tensor; raises as `chunks`."""
        out, at = np.empty(tensor.size, numpy_dtype(tensor.dtype)), 0
        for chunk in self.chunks(tensor):
            out[at : at + chunk.size] = chunk
            at += chunk.size
        return out.reshape(tensor.shape)

    def _fill(
        self, out: np.ndarray, start: Sequence[int], tensor: TensorInFiles, piece: StoredPiece,
        done: dict[StoredPiece, tuple[int, int]],
    ) -> None:  # fmt: skip
        """Copies the part of a piece that is in the box of `out`, which begins at `start`."""
        low = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(start, out.shape, piece.start, piece.shape, strict=True)
        ]
        common = tuple(h - lo for h, lo in zip(high, low, strict=True))
        if any(length <= 0 for length in common):
            return
        before = 0  # elements of the piece before the part
        for lo, begin, length in zip(low, piece.start, piece.shape, strict=True):
            before = before * length + lo - begin
        begin, count = before * out.itemsize, math.prod(common) * out.itemsize
        data = self._bytes(tensor, piece, begin, count)
        length, crc32c = done.get(piece, (0, 0))
        if piece.crc32c is not None and begin == length:
            crc32c = google_crc32c.extend(crc32c, data)
        done[piece] = (length + count, crc32c)
        where = tuple(
            slice(lo - a, lo - a + n) for lo, a, n in zip(low, start, common, strict=True)
        )
        out[where] = np.frombuffer(data, out.dtype).reshape(common)

    def _bytes(self, tensor: TensorInFiles, piece: StoredPiece, begin: int, count: int) -> bytes:
        try:
            file = self._open(piece.file)
            file.seek(piece.offset + begin)
            data = file.read(count)
        except OSError as error:
            raise DamagedCheckpointError(
                f"{tensor.key} cannot be read from {piece.file}: {first_line(error)}"
            ) from error
        if len(data) != count:
            raise DamagedCheckpointError(f"{tensor.key} cannot be read: {piece.file} is truncated")
        return data

    def _open(self, path: str) -> IO[bytes]:
        if path not in self._opened:
            self._opened[path] = files.open(path)
            if len(self._opened) > _MOST_OPEN_FILES:
                self._opened.popitem(last=False)[1].close()
        self._opened.move_to_end(path)
        return self._opened[path]


def problems_of_cover(tensor: TensorInFiles) -> list[str]:
    """Returns what is wrong with the pieces of a tensor: each element must be in exactly one."""
    found = []
    for piece in tensor.pieces:
        ends = [a + n for a, n in zip(piece.start, piece.shape, strict=True)]
        if any(end > n for end, n in zip(ends, tensor.shape, strict=True)):
            found.append(f"{tensor.key}: the piece at {list(piece.start)} is outside of the tensor")
    open_ones: list[StoredPiece] = []  # those that the next piece can overlap
    for piece in sorted(tensor.pieces, key=lambda piece: piece.start):
        open_ones = [one for one in open_ones if one.start[0] + one.shape[0] > piece.start[0]]
        for other in open_ones:
            if _overlap(piece, other):
                found.append(
                    f"{tensor.key}: the pieces at {list(other.start)} and {list(piece.start)} "
                    "overlap"
                )
        if piece.start:
            open_ones.append(piece)
    covered = sum(math.prod(piece.shape) for piece in tensor.pieces)
    if covered != tensor.size and not found:
        found.append(f"{tensor.key}: its pieces have {covered:,} of {tensor.size:,} elements")
    return found


def _overlap(one: StoredPiece, other: StoredPiece) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


def problems_of_files(
    tensors: Mapping[str, TensorInFiles], data: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Returns what is wrong with the byte ranges: each byte of data must be in exactly one.

    Args:
      tensors: all tensors by key.
      data: {path of a data file: (offset of its first byte of data, size of the file)}.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {path: [] for path in data}
    for key, tensor in tensors.items():
        for piece in tensor.pieces:
            ranges.setdefault(piece.file, []).append((piece.offset, piece.length, key))
    found = []
    for path, used in sorted(ranges.items()):
        name = files.base_name(path)
        if path not in data:
            found.append(f"{name} is missing; {used[0][2]} is in it")
            continue
        (at, size), last = data[path], "the header"
        for begin, length, key in sorted(used):
            if length and begin != at:
                what = "overlap" if begin < at else f"leave {begin - at:,} bytes between them"
                found.append(f"{name}: the bytes of {last} and {key} {what}")
            at, last = max(at, begin + length), key
        if at != size:
            found.append(f"{name} has {size:,} bytes, but the tensors in it end at byte {at:,}")
    return found
