"""Writes metrics.jsonl: one JSON object per logged step or evaluation, written immediately.

A killed process loses nothing that it logged. A process that resumes from an earlier step first
removes the lines of later steps, so the file reads like the file of one uninterrupted run.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.json_text import to_json

STEP = "step"
SPLIT = "split"
TRAIN = "train"
SEEN = "_seen"  # ends the name of the units that training has processed, "tokens_seen"
MACHINE = "machine"  # what other programs used of it; see `machine_load.py`
SECONDS = "seconds"  # what the time was spent on, {activity: seconds}; see `time_use.py`

Record = Mapping[str, Any]


class MetricsLog:
    """Appends records to a file of JSON lines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: Any = None

    def keep_until(self, step: int) -> None:
        """Removes the records of later steps, and an incomplete last line; the write is atomic."""
        if not files.exists(self.path):
            return
        content = files.read(self.path)
        kept = b"".join(
            line
            for line in content.splitlines(keepends=True)
            if line.endswith(b"\n") and (record := _parse(line)) and record[STEP] <= step
        )
        if kept != content:
            files.write_atomically(self.path, kept)

    def append(self, record: Record) -> None:
        """Writes one record to the file before it returns. NaN and inf become null.

        Raises:
          OSError: the file cannot be written, and has no part of the record; or the record was
            written, but the file was removed (see `content`).
        """
        line = to_json(record) + "\n"
        data = line.encode()
        try:
            self.open()
            if files.is_local(self.path):
                _append_whole(self._file.fileno(), data)
            else:
                self._file.write(data)
                self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    def open(self) -> None:
        """Opens the file, so that records are written to it even if its folder is replaced."""
        if self._file is None:
            # No buffer: it would keep data that a full disk does not accept.
            if files.is_local(self.path):
                files.check_regular(self.path)
                self._file = io.FileIO(self.path, "a+")
            else:
                self._file = files.open(self.path, "ab")

    def sync(self) -> None:
        """Waits until all records are on the disk."""
        if self._file is not None and files.is_local(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def content(self) -> bytes:
        """Returns all that was written, also if the file was removed or moved meanwhile."""
        if self._file is not None and files.is_local(self.path):
            descriptor = self._file.fileno()
            return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return files.read(self.path) if files.exists(self.path) else b""

    def read(self) -> list[dict[str, Any]]:
        """Returns all complete records, in the order of the file."""
        if not files.exists(self.path):
            return []
        lines = files.read(self.path).splitlines()
        return [record for line in lines if (record := _parse(line))]

    def left_out(self) -> list[int]:
        """Returns the numbers of the lines, from 1 on, that `read` leaves out: damaged ones."""
        if not files.exists(self.path):
            return []
        lines = enumerate(files.read(self.path).splitlines(), start=1)
        return [number for number, line in lines if _parse(line) is None]


def _append_whole(file: int, data: bytes) -> None:
    """Appends data to a local file, completely or, if that fails, not at all."""
    status, written = os.fstat(file), 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        with contextlib.suppress(OSError):  # otherwise, the next process removes the partial line
            if os.fstat(file).st_size == status.st_size + written:  # no other process appended
                os.ftruncate(file, status.st_size)
        raise
    if not status.st_nlink:
        raise FileNotFoundError(errno.ENOENT, "the file was removed during the run")


def history(
    records: Iterable[Record], metric: str, *, since: int = -1
) -> list[tuple[int, float | None]]:
    """Returns the step and the value of every evaluation that has a metric, in order.

    Args:
      records: records of the log.
      metric: "evaluation/metric".
      since: only evaluations after this step.
    """
    split, _, name = metric.partition("/")
    found = (r for r in records if r[SPLIT] == split and name in r and r[STEP] > since)
    return [(r[STEP], r[name]) for r in found]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = bounded.parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get(SPLIT), str):
        return None
    step = record.get(STEP)
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63
    return record if is_step else None
