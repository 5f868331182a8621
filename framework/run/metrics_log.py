"""metrics.jsonl: one JSON object a logged step or evaluation, at once in the file.

A process that is killed loses nothing that it logged. One that starts again from an earlier step
takes the lines beyond that step away first, so the file reads like that of one long run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from tekso.framework import files

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
        """Removes the records of later steps, and a last line that was cut off; all or nothing."""
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
        """Writes one record; it is in the file when this returns. NaN and inf become null."""
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
        # Without a buffer, which would hold what a full disk does not take.
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
        """Returns all whole records, in the order of the file."""
        if not files.exists(self.path):
            return []
        lines = files.read(self.path).splitlines()
        return [record for line in lines if (record := _parse(line))]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get(STEP), int) else None


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
