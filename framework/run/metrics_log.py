"""Writes metrics.jsonl: one JSON object per logged step or evaluation, written immediately.

A killed process loses nothing that it logged. A process that resumes from an earlier step first
removes the lines of later steps, so the file reads like the file of one uninterrupted run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tekso.framework import bounded, files

STEP = "step"
SPLIT = "split"
TRAIN = "train"

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
        """Writes one record to the file before it returns. NaN and inf become null."""
        line = json.dumps({name: _jsonable(value) for name, value in record.items()}) + "\n"
        data = line.encode()
        try:
            if self._file is None:
                self._file = self._open()
            while data:
                data = data[self._file.write(data) or len(data) :]
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    def _open(self) -> Any:
        # No buffer: it would keep data that a full disk does not accept.
        local = files.is_local(self.path)
        return open(self.path, "ab", buffering=0) if local else files.open(self.path, "ab")

    def sync(self) -> None:
        """Waits until all records are on the disk."""
        if self._file is not None and files.is_local(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> list[dict[str, Any]]:
        """Returns all complete records, in the order of the file."""
        if not files.exists(self.path):
            return []
        lines = files.read(self.path).splitlines()
        return [record for line in lines if (record := _parse(line))]


def history(records: Iterable[Record], metric: str) -> list[tuple[int, float | None]]:
    """Returns the step and the value of every evaluation that has a metric, in order.

    Args:
      records: records of the log.
      metric: "evaluation/metric".
    """
    split, _, name = metric.partition("/")
    return [(r[STEP], r[name]) for r in records if r[SPLIT] == split and name in r]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = bounded.parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get(STEP), int) else None


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
