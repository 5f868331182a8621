"""ArrayRecord files as a source with random access; requires the package array_record (Linux).

An ArrayRecord file has chunks of records, and an index of the chunks at its end. Records are read
by index from any number of files; nothing but the number of records per file is kept in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tekso.framework import files, out_of_memory
from tekso.framework.input.errors import InputError
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.line_index import Chosen
from tekso.framework.input.record_files import RecordFiles
from tekso.framework.input.skips import BadRecordError, Origin, first_line
from tekso.framework.input.sources import Digest
from tekso.framework.input.splits import Split
from tekso.framework.input.text_files import FileChoice
from tekso.framework.input.tfrecords import feature_of

_TOGETHER = 256  # records that are read together, in order
_OPEN = 64  # files that are open at the same time
_RECORDS_A_BYTE = 64  # more do not fit into a file, however well it is compressed
_READ = 1 << 20  # bytes that are read together
_THREADS = 600 << 20  # bytes of a limited address space for the threads of array_record
_OPENED: list[str] = []  # it starts them with the first file


class ArrayRecords(RecordFiles):
    """Records of ArrayRecord files: bytes, or one feature of a tf.train.Example."""

    class Params(RecordFiles.Params):
        """Params of ArrayRecords."""

    format_name = "ArrayRecord"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the files and counts their records.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no files are given, too many are malformed, no records are left, or the
            package array_record is not installed.
        """
        super().__init__(params, split=split)
        choice = FileChoice.of(self.params, split)
        self._paths: list[str] = []
        self._chosen: list[Chosen] = []
        self._fingerprint: str | None = None
        self._reader = functools.lru_cache(_OPEN)(_reader)
        for path in choice.paths:
            count = self._count(path)
            if count:
                self._paths.append(path)
                self._chosen.append(Chosen(self._masks(path, count, choice)))
        self._index = JoinedIndex(len(one) for one in self._chosen)
        if not len(self):
            raise self.skips.nothing_left()

    def __len__(self) -> int:
        return len(self._index)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record: its file, and its number in the file."""
        file, number = self._place(index)
        return Origin(self._paths[file], number, "record")

    def fingerprint(self) -> str:
        """Returns a digest of the records; the first call reads all files."""
        if self._fingerprint is None:
            self._fingerprint = self._digest()
        return self._fingerprint

    def _digest(self) -> str:
        total = Digest()
        for path, chosen in zip(self._paths, self._chosen, strict=True):
            total.begin(files.size_bytes(path))
            with files.open(path) as file:
                while block := file.read(_READ):
                    total.update(block)
            total.add(chosen.bits)
        total.add(self.params.feature.encode())
        return total.hexdigest()

    def _count(self, path: str) -> int:
        """Returns the number of records of a file; 0 if it was skipped."""
        try:
            files.read(path, 0, 1)  # the reader does not report a missing file
            count = int(self._reader(path).num_records())
        except (OSError, RuntimeError, ValueError) as error:
            self.skips.add(Origin(path), getattr(error, "strerror", None) or _reason(error))
            return 0
        if count > _RECORDS_A_BYTE * files.size_bytes(path):
            self.skips.add(Origin(path), f"damaged: it cannot have {count} records")
            return 0
        if not count:
            self.skips.add(Origin(path), "no records: not an ArrayRecord file, truncated or empty")
        return count

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the index of the file of a record, and its number in the file."""
        file, within = self._index.place(index)
        return file, self._chosen[file].number(within)

    def _read(self, index: int) -> Any:
        file, number = self._place(index)
        origin = Origin(self._paths[file], number, "record")
        try:
            (record,) = self._reader(origin.file).read([number])
        except (RuntimeError, ValueError) as error:
            raise BadRecordError(origin, _reason(error)) from error
        return self._record(record, origin)

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        begin = 0
        for path, chosen in zip(self._paths, self._chosen, strict=True):
            for first in range(0, chosen.size, _TOGETHER):
                numbers = chosen.among(first, min(_TOGETHER, chosen.size - first)) + first
                yield from self._some(path, begin, numbers.tolist())
                begin += len(numbers)

    def _some(self, path: str, begin: int, numbers: list[int]) -> Iterator[tuple[Origin, Any]]:
        """Yields records of a file; one by one if some of them are damaged."""
        try:
            records = self._reader(path).read(numbers) if numbers else []
        except (RuntimeError, ValueError):
            for index in range(begin, begin + len(numbers)):
                try:
                    record = self._read(index)
                except BadRecordError as error:
                    record = error
                yield self.origin(index), record
            return
        for number, record in zip(numbers, records, strict=True):
            origin = Origin(path, number, "record")
            try:
                yield origin, self._record(record, origin)
            except BadRecordError as error:
                yield origin, error

    def _record(self, record: bytes, origin: Origin) -> Any:
        return feature_of(record, self.params.feature, origin) if self.params.feature else record


def _reader(path: str) -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise InputError(
            "ArrayRecord files need the package array_record, which is available for Linux: "
            "pip install array_record"
        ) from error
    left = out_of_memory.left_bytes()
    if left is not None and not _OPENED and left < _THREADS:  # it would wait without an end
        raise MemoryError(
            f"the package array_record starts 64 threads, which take {_THREADS / 1e6:,.0f} MB of "
            "the address space"
        )
    _OPENED[:] = [path]
    # By default, every open file has threads, and buffers of 16 MB for each of them.
    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(path, options)


def _reason(error: Exception) -> str:
    return first_line(error).partition("; at byte")[0]
