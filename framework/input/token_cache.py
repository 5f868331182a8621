"""A cache of numbers on disk, such as encoded texts: written once, shared, read by ranges.

Processes and runs share an entry:

    <folder>/<name>/              an entry; it is renamed to this name when it is complete
        <column>.bin              the numbers of a column
        entry.json                lengths and checksums of the columns, totals, skipped texts
        verified.json             sizes and times of the files whose checksums have been verified
    <folder>/<name>.lock          locked by the process that writes the entry
    <folder>/<name>.unfinished.*  what a process has written before it was killed

The name contains a digest of the data and the settings, so an entry never has to be updated. The
operating system releases the lock of a process that ends for any reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from tekso.framework import bounded, files
from tekso.framework.input.columns import Column, FileColumn
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Skip, Skips
from tekso.framework.input.sources import digest

IN_MEMORY = 1 << 26  # bytes; smaller tables of fast tokenizers stay in memory
IN_MEMORY_SLOW = 1 << 20  # bytes; the same for tokenizers that take longer than reading a file
_ABOUT = "entry.json"
_VERIFIED = "verified.json"
_FORMAT = "token table 1"


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of numbers, and totals.

    Attributes:
      columns: {name: column}; the columns may have different lengths.
      totals: {name: number}.
    """

    columns: Mapping[str, Column]
    totals: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table is cached.

    Attributes:
      folder: local folder of the cache.
      name: prefix of the entry's name, to recognise it.
      made_of: fingerprints of the data and of all settings that the table depends on.
      in_memory_bytes: a table of at most this size is not written.
      what: what the table has, in the plural, for messages.
    """

    folder: str
    name: str
    made_of: Sequence[str]
    in_memory_bytes: int
    what: str = "tokens"

    @property
    def path(self) -> str:
        """Path of the entry."""
        key = digest(part.encode() for part in (_FORMAT, *self.made_of))
        return files.join(self.folder, f"{self.name}-{key[:16]}")


class TableWriter:
    """Collects columns in memory; larger ones are written to a folder.

    Args:
      in_memory_bytes: size from which they are written.
      folder: called once when they have this size. It returns the folder; None: keep them in
        memory.
      what: what the columns have, in the plural, for messages.
    """

    def __init__(
        self, in_memory_bytes: int, folder: Callable[[], str | None], what: str = "tokens"
    ) -> None:
        self._what = what
        self._limit: int | None = in_memory_bytes
        self._make_folder = folder
        self._folder: str | None = None
        self._in_memory: dict[str, list[np.ndarray]] = {}
        self._size = 0
        self._files: dict[str, IO[bytes]] = {}
        self._about: dict[str, dict[str, Any]] = {}
        self._totals: dict[str, int] = {}

    def append(self, column: str, numbers: np.ndarray) -> None:
        """Appends numbers to a column; all numbers of a column must have the same dtype.

        Raises:
          InputError: they cannot be written.
        """
        self._in_memory.setdefault(column, []).append(numbers)
        self._size += numbers.nbytes
        if self._limit is not None and self._size > self._limit:
            self._limit, self._folder = None, self._make_folder()
        if self._folder is not None:
            with _naming_the_folder(self._folder, self._what):
                self._flush(self._folder)

    def add(self, total: str, number: int) -> None:
        """Adds to a total."""
        self._totals[total] = self._totals.get(total, 0) + int(number)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been appended."""
        return not self._size

    def in_memory(self) -> Table | None:
        """Returns the table; None if it has been written to a folder."""
        if self._folder is not None:
            return None
        columns = {name: Column(np.concatenate(one)) for name, one in self._in_memory.items()}
        return Table(columns, self._totals)

    def finish(self, path: str, skipped: Sequence[Skip]) -> None:
        """Completes the entry, waits until it is on the disk, and renames it.

        Raises:
          InputError: it cannot be written.
        """
        about = {
            "columns": self._about,
            "totals": self._totals,
            "skipped": [dataclasses.asdict(skip) for skip in skipped],
        }
        folder = self._folder or ""
        with _naming_the_folder(folder, self._what):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            files.write_atomically(files.join(folder, _ABOUT), json.dumps(about) + "\n")
            if not files.exists(path):  # without locks, another process may have been faster
                files.rename(folder, path)
                files.sync(os.path.dirname(path))

    def close(self) -> None:
        """Closes the files, and removes them unless they were completed."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        if self._folder is not None:
            files.remove_folder(self._folder)

    def _flush(self, folder: str) -> None:
        for name, arrays in self._in_memory.items():
            for numbers in arrays:
                if name not in self._files:
                    files.make_folder(folder)
                    self._files[name] = files.open(_file(folder, name), "wb")
                    self._about[name] = {"dtype": numbers.dtype.str, "length": 0, "crc32": 0}
                about = self._about[name]
                data = np.ascontiguousarray(numbers).data.cast("B")
                self._files[name].write(data)
                about["crc32"] = zlib.crc32(data, about["crc32"])
                about["length"] += len(numbers)
        self._in_memory.clear()


def obtain(place: Place | None, *, skips: Skips, write: Callable[[TableWriter], None]) -> Table:
    """Returns a table: reads it from the cache, or makes it, and caches it if it is large.

    One process writes a large table while other processes wait for it.

    Args:
      place: where it is cached; None: make it in memory.
      skips: counts the malformed data that is skipped. That of a cached table is added to it.
      write: makes the table with the writer.

    Raises:
      InputError: the table cannot be written, or more data was skipped than is now allowed.
    """
    if place is None:
        writer = TableWriter(0, lambda: None)
        write(writer)
        return writer.in_memory() or Table({}, {})
    with contextlib.suppress(_DamagedError):  # then the process that has the lock replaces it
        if (found := _opened(place.path, skips)) is not None:
            return found
    with contextlib.ExitStack() as stack:
        writer = TableWriter(
            place.in_memory_bytes, lambda: _folder(place, skips, stack), place.what
        )
        stack.callback(writer.close)
        try:
            write(writer)
        except _FoundError as other:
            return other.table
        table = writer.in_memory()
        if table is not None:
            return table
        writer.finish(place.path, skips.all)
        try:
            found = _opened(place.path, skips)
        except _DamagedError as error:
            raise InputError(f"{error}, but it was just written: check the disk") from error
        if found is None:
            raise InputError(f"{place.path} has been removed while it was written")
        return found


class _DamagedError(Exception):
    """An entry cannot be read; the message names the file."""


class _FoundError(Exception):
    """Another process has written the table in the meantime."""

    def __init__(self, table: Table) -> None:
        super().__init__("the table is in the cache")
        self.table = table


def _folder(place: Place, skips: Skips, stack: contextlib.ExitStack) -> str | None:
    """Returns the folder to write an entry to; None if that is not possible.

    Locks the entry until the stack is closed.

    Raises:
      _FoundError: the entry exists.
    """
    try:
        files.make_folder(place.folder)
        is_locked = stack.enter_context(_locked(place.path))
    except OSError as error:
        logging.warning("%s are kept in memory and not cached: %s", place.what, error)
        return None
    try:
        if (found := _opened(place.path, skips)) is not None:
            raise _FoundError(found)
    except _DamagedError as error:
        logging.warning("%s is damaged (%s) and is written again", place.path, error)
        files.remove_folder(place.path)
    unfinished = f"{files.base_name(place.path)}.unfinished."
    if is_locked:
        for name in files.names(place.folder):  # of processes that were killed
            if name.startswith(unfinished):
                files.remove_folder(files.join(place.folder, name))
    return files.join(place.folder, f"{unfinished}{socket.gethostname()}.{os.getpid()}")


@contextlib.contextmanager
def _naming_the_folder(folder: str, what: str) -> Iterator[None]:
    """Converts errors of writing in the block to one that says what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{what} cannot be cached in {os.path.dirname(folder)}: {error.strerror or error}. "
            "Free some space, or set `cache_dir` of the input to another folder"
        ) from error


def _opened(path: str, skips: Skips) -> Table | None:
    """Returns the table of an entry; None if it does not exist.

    Raises:
      _DamagedError: it cannot be read.
    """
    if not files.exists(path):
        return None
    try:
        about = bounded.read_json(files.join(path, _ABOUT))
        _verify(path, about["columns"])
        columns = {
            name: FileColumn(_file(path, name), one["dtype"], one["length"])
            for name, one in about["columns"].items()
        }
        skipped = [Skip(**skip) for skip in about["skipped"]]
        table = Table(columns, {name: int(total) for name, total in about["totals"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(str(error)) from error
    for skip in skipped:
        skips.add(skip.origin, skip.reason)
    return table


def _verify(path: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks the files of an entry.

    Checksums are computed for files that have been written since the last check.

    Raises:
      ValueError: a file is damaged.
    """
    verified = files.join(path, _VERIFIED)
    known = {}
    with contextlib.suppress(OSError, ValueError):
        known = bounded.read_json(verified)
    stamps = {}
    for name, about in columns.items():
        if np.dtype(about["dtype"]).kind not in "iuf" or files.base_name(name) != name:
            raise ValueError(f"it has a column {name!r} of {about['dtype']!r}")
        file = _file(path, name)
        status = os.stat(file)
        size = np.dtype(about["dtype"]).itemsize * about["length"]
        if status.st_size != size:
            raise ValueError(f"{file} has {status.st_size:,} bytes instead of {size:,}")
        stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ino]
        if known.get(name) != stamps[name] and _checksum(file) != about["crc32"]:
            raise ValueError(f"the checksum of {file} is wrong")
    if stamps != known:
        with contextlib.suppress(OSError):  # a folder that may only be read
            files.write_atomically(verified, json.dumps(stamps) + "\n")


def _checksum(path: str) -> int:
    found = 0
    with files.open(path) as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


def _file(folder: str, column: str) -> str:
    return files.join(folder, f"{column}.bin")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Locks an entry for this process; waits while another process has the lock.

    Yields:
      whether it is locked; some file systems have no locks. The first complete entry is then used.

    Raises:
      OSError: the lock cannot be created.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    is_locked = True
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.info("waiting for another process, which writes %s", path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(lock)
