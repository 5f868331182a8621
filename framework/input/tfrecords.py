"""TFRecord files as a source with random access.

A record is   length (8 bytes) | its checksum (4) | data (length) | its checksum (4).

Each file is scanned once to build an index, which checks the checksums of lengths. The checksum of
the data is checked when a record is read. No file is held in memory. Reading single records of a
gzip-compressed file is slow, because it is decompressed from its beginning.

TensorFlow's own readers do not replace this one. `tf.data.TFRecordDataset` has no random access,
and stops at the first damaged record. `tf_record_random_reader` (TensorFlow 2.21) reads the file
from its beginning for an offset before the last one: a record of 200 bytes in random order takes
0.2 ms of CPU time in a file of 4 MB, 1.5 ms in 22 MB and 2.6 ms in 86 MB; here it takes 0.04 ms. It
cannot read compressed files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import struct
import zlib
from collections.abc import Iterator
from typing import IO, Any

import google_crc32c
import numpy as np

from tekso.framework import files
from tekso.framework.input.record_files import RecordFiles
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split, part
from tekso.framework.input.text_files import FileChoice

_HEADER = struct.Struct("<QI")
_HEADER_DTYPE = np.dtype([("length", "<u8"), ("checksum", "<u4")])
_LENGTH_BYTES = 8
_FOOTER = struct.Struct("<I")
_LONGEST = (1 << 31) - 1  # bytes of data, of which gzip needs a few to store zeros
_BLOCK = 1 << 20  # bytes that are decompressed together
_GZIP = b"\x1f\x8b"


class TfRecords(RecordFiles):
    """Records of TFRecord files: bytes, or one feature of a tf.train.Example."""

    class Params(RecordFiles.Params):
        """Params of TfRecords."""

    format_name = "TFRecord"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the files and indexes them.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no files are given, too many are malformed, or no records are left.
        """
        super().__init__(params, split=split)
        choice = FileChoice.of(self.params, split)
        self._paths: list[str] = []
        self._compressed: set[str] = set()
        self._digests: list[bytes] = []
        found: list[np.ndarray] = []
        for path in choice.paths:
            frames = self._walk(path)
            if frames is None:
                continue
            chosen = self._chosen(path, len(frames.offsets), choice)
            self._digests.append(frames.digest)
            found.append(np.stack([frames.offsets[chosen], frames.lengths[chosen]], axis=1))
            self._paths.append(path)
        counts = [len(records) for records in found]
        if not sum(counts):
            raise self.skips.nothing_left()
        self._records = np.concatenate(found)
        self._file = np.repeat(np.arange(len(found)), counts)

    def __len__(self) -> int:
        return len(self._records)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._paths[self._file[index]], int(self._records[index, 0]))

    def fingerprint(self) -> str:
        """Returns a digest of the records."""
        kept = [self._file.tobytes(), self._records.tobytes(), self.params.feature.encode()]
        return digest([*self._digests, *kept])

    def _walk(self, path: str) -> Frames | None:
        try:
            size = files.size_bytes(path)
            if _is_gzip(files.read(path, 0, _HEADER.size)):
                self._compressed.add(path)
                with self._open(path) as file:
                    size = sum(len(block) for block in iter(lambda: file.read(_BLOCK), b""))
            with self._open(path) as file:
                frames = walk(file, size)
        except (EOFError, zlib.error) as error:
            self.skips.add(Origin(path), f"damaged gzip file: {error}")
            return None
        except OSError as error:
            self.skips.add(Origin(path), reason_of(error))
            return None
        if frames.problem:
            self.skips.add(Origin(path, frames.end), frames.problem)
        return frames

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[IO[bytes]]:
        with files.open(path) as file:
            if path not in self._compressed:
                yield file
                return
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked  # type: ignore[misc]

    def _chosen(self, path: str, count: int, choice: FileChoice) -> slice | np.ndarray:
        if self.params.holdout == "end":
            return slice(*part(count, self.split, choice.dev_fraction, choice.test_fraction))
        return self._chosen_by_hash(path, range(count), choice)

    def _read(self, index: int) -> Any:
        origin = self.origin(index)
        try:
            with self._open(origin.file) as file:
                return self._record(file, origin, int(self._records[index, 1]))
        except OSError as error:
            raise BadRecordError(origin, reason_of(error)) from error

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        begin = 0
        for number, path in enumerate(self._paths):
            end = int(np.searchsorted(self._file, number, "right"))
            with self._open(path) as file:
                for offset, length in self._records[begin:end].tolist():
                    origin = Origin(path, offset)
                    record: Any
                    try:
                        record = self._record(file, origin, length)
                    except BadRecordError as error:
                        record = error
                    yield origin, record
            begin = end

    def _record(self, file: IO[bytes], origin: Origin, length: int) -> Any:
        return self.parse(read_frame(file, origin, length), origin)

    def parse(self, record: bytes, origin: Origin) -> Any:
        """Returns the value of a record; a subclass may override it.

        Args:
          record: the bytes of the record, whose checksum is right.
          origin: its position.

        Raises:
          BadRecordError: the record is malformed.
        """
        return feature_of(record, self.params.feature, origin) if self.params.feature else record


@dataclasses.dataclass(frozen=True)
class Frames:
    """Index of one file.

    Attributes:
      offsets: [n] int64, first byte of each record, including its header.
      lengths: [n] int64, bytes of data in each record.
      digest: digest of lengths and checksums.
      end: first byte after the last valid record.
      problem: the reason why the scan stopped before the end of the file; empty: it did not.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    digest: bytes
    end: int
    problem: str


def walk(file: IO[bytes], size: int) -> Frames:
    """Returns the index of a file; scans it record by record and checks every length.

    Args:
      file: the file, at its beginning.
      size: number of bytes in it.
    """
    headers = bytearray()
    footers = bytearray()
    offsets: list[int] = []
    offset, problem = 0, "" if size else "empty"
    while offset < size:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            problem = f"the header of a record is truncated after {len(header)} bytes"
            break
        length, checksum = _HEADER.unpack(header)
        if masked_checksum(header[:_LENGTH_BYTES]) != checksum:
            # Only the length gives the start of the next record.
            problem = "the length of a record has a wrong checksum: the rest of the file is lost"
            if offset == 0:
                problem = "not a TFRecord file: the checksum of the first length is wrong"
            break
        headers += header
        end = offset + _HEADER.size + length + _FOOTER.size
        if length > _LONGEST:
            problem = f"a record of {length} bytes is longer than {_LONGEST} bytes"
            break
        if end > size:
            problem = f"a record of {length} bytes of data is truncated by the end of the file"
            break
        file.seek(offset + _HEADER.size + length)
        offsets.append(offset)
        footers += file.read(_FOOTER.size)
        offset = end
    lengths = np.frombuffer(bytes(headers), _HEADER_DTYPE)["length"]
    return Frames(
        offsets=np.array(offsets, np.int64),
        lengths=lengths[: len(offsets)].astype(np.int64),
        digest=bytes.fromhex(digest([bytes(headers), bytes(footers)])),
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
    file.seek((origin.offset or 0) + _HEADER.size)
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


def _is_gzip(begin: bytes) -> bool:
    """Returns whether a file is gzip-compressed; a valid record may begin with the same bytes."""
    if not begin.startswith(_GZIP) or len(begin) < _HEADER.size:
        return False
    found: bool = masked_checksum(begin[:_LENGTH_BYTES]) != _HEADER.unpack(begin)[1]
    return found


def feature_of(record: bytes, name: str, origin: Origin) -> Any:
    """Returns a feature of a serialised tf.train.Example.

    The result is bytes for a single byte string, a list for several, otherwise an array.

    Raises:
      BadRecordError: the record is not an Example, or has no such feature.
    """
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError as error:
        raise BadRecordError(origin, "the record is not a tf.train.Example") from error
    if name not in features:
        names = ", ".join(sorted(features)) or "none"
        raise BadRecordError(origin, f"the record has no feature {name!r}, only: {names}")
    feature = features[name]
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        values = feature.bytes_list.value
        return values[0] if len(values) == 1 else list(values)
    if kind == "int64_list":
        return np.array(feature.int64_list.value, np.int64)
    return np.array(feature.float_list.value, np.float32)
