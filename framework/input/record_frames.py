"""The frames of a TFRecord file: where its records are, in 4 bytes per record.

A record is   length (8 bytes) | its checksum (4) | data (length) | its checksum (4).

The records of a file follow each other. So the lengths are kept, and the position of every 64th
record; the positions between are sums of lengths.
"""

from __future__ import annotations

import array
import dataclasses
import struct
from collections.abc import Iterator
from typing import IO

import google_crc32c
import numpy as np
import numpy.typing as npt

from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.sources import Digest

HEADER = struct.Struct("<QI")
LENGTH_BYTES = 8
_HEADER_DTYPE = np.dtype([("length", "<u8"), ("checksum", "<u4")])
_FOOTER = struct.Struct("<I")
_LONGEST = (1 << 31) - 1  # bytes of data, of which gzip needs a few to store zeros
_GROUP = 64  # records
_BLOCK = 1 << 12  # records whose positions are computed together; a multiple of 64


@dataclasses.dataclass(frozen=True)
class Frames:
    """Consecutive records of a file.

    Attributes:
      lengths: [n] uint32, bytes of data in each record.
      starts: [n / 64, rounded up] int64, first byte of every 64th record, including its header.
      digest: digest of the lengths and checksums of the whole file.
      end: first byte after the last valid record of the file.
      problem: the reason why the scan stopped before the end of the file; empty: it did not.
    """

    lengths: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    digest: bytes
    end: int
    problem: str

    def __len__(self) -> int:
        return len(self.lengths)

    def offset(self, number: int) -> int:
        """Returns the first byte of a record, including its header."""
        group = number // _GROUP
        return int(self.starts[group]) + _size(self.lengths[group * _GROUP : number])

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yields first byte and bytes of data of all records in order, in arrays [records, 2]."""
        for begin in range(0, len(self), _BLOCK):
            lengths = self.lengths[begin : begin + _BLOCK].astype(np.int64)
            ends = np.cumsum(lengths + (HEADER.size + _FOOTER.size)) + self.starts[begin // _GROUP]
            offsets = np.concatenate([self.starts[begin // _GROUP, None], ends[:-1]])
            yield np.stack([offsets, lengths], axis=1)

    def part(self, begin: int, end: int) -> Frames:
        """Returns the records begin, …, end - 1, numbered from 0."""
        starts = [self.offset(number) for number in range(begin, end, _GROUP)]
        return dataclasses.replace(
            self, lengths=self.lengths[begin:end].copy(), starts=np.array(starts, np.int64)
        )


def walk(file: IO[bytes], size: int) -> Frames:
    """Returns the frames of a file; scans it record by record and checks every length.

    Args:
      file: the file, at its beginning.
      size: number of bytes in it.
    """
    lengths, checksums = array.array("I"), array.array("I")  # 4 bytes each; a list needs 40
    footers, starts = bytearray(), array.array("q")
    refused = b""
    offset, problem = 0, "" if size else "empty"
    while offset < size:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            problem = f"the header of a record is truncated after {len(header)} bytes"
            break
        length, checksum = HEADER.unpack(header)
        if masked_checksum(header[:LENGTH_BYTES]) != checksum:
            # Only the length gives the start of the next record.
            problem = "the length of a record has a wrong checksum: the rest of the file is lost"
            if offset == 0:
                problem = "not a TFRecord file: the checksum of the first length is wrong"
            break
        end = offset + HEADER.size + length + _FOOTER.size
        if length > _LONGEST:
            problem = f"a record of {length} bytes is longer than {_LONGEST} bytes"
        elif end > size:
            problem = f"a record of {length} bytes of data is truncated by the end of the file"
        if problem:
            refused = header
            break
        file.seek(offset + HEADER.size + length)
        if len(lengths) % _GROUP == 0:
            starts.append(offset)
        lengths.append(length)
        checksums.append(checksum)
        footers += file.read(_FOOTER.size)
        offset = end
    return Frames(
        lengths=np.array(lengths, np.uint32),
        starts=np.array(starts, np.int64),
        digest=_digest(lengths, checksums, footers, refused),
        end=offset,
        problem=problem,
    )


def read_frame(file: IO[bytes], origin: Origin, length: int) -> bytes:
    """Returns the data of a record.

    Args:
      file: the file, open.
      origin: position of the record.
      length: bytes of data in it.

    Raises:
      BadRecordError: the record is truncated, or its checksum is wrong.
    """
    file.seek((origin.offset or 0) + HEADER.size)
    data = file.read(length + _FOOTER.size)
    record, footer = data[:length], data[length:]
    if len(footer) < _FOOTER.size:
        raise BadRecordError(origin, "the record is truncated")
    if masked_checksum(record) != _FOOTER.unpack(footer)[0]:
        raise BadRecordError(origin, f"the {length} bytes of data have a wrong checksum")
    return record


def masked_checksum(data: bytes) -> int:
    """Returns the CRC-32C of some bytes, masked as in TFRecord files."""
    checksum = google_crc32c.value(data)
    found: int = (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return found


def _size(lengths: npt.NDArray[np.uint32]) -> int:
    """Returns the bytes of consecutive records in a file."""
    return int(lengths.sum(dtype=np.int64)) + len(lengths) * (HEADER.size + _FOOTER.size)


def _digest(
    lengths: array.array[int], checksums: array.array[int], footers: bytearray, refused: bytes
) -> bytes:
    """Returns a digest of all headers, with that of a record that is not read, and all footers."""
    total = Digest()
    total.begin(len(lengths) * HEADER.size + len(refused))
    for begin in range(0, len(lengths), _BLOCK):
        headers = np.zeros(min(_BLOCK, len(lengths) - begin), _HEADER_DTYPE)
        headers["length"] = lengths[begin : begin + _BLOCK]
        headers["checksum"] = checksums[begin : begin + _BLOCK]
        total.update(headers.tobytes())
    total.update(refused)
    total.begin(len(footers))
    total.update(memoryview(footers))
    return bytes.fromhex(total.hexdigest())
