"""Reads lines of a file or of standard input as soon as they are available.

A line that a user types is returned at once; a file is read in large blocks.
"""

from __future__ import annotations

import dataclasses
import os
import select
import sys
from typing import IO, Any

from tekso.framework import files

STANDARD_INPUT = "-"
_READ_BYTES = 1 << 16
_LONGEST_BYTES = 1 << 20  # of a line; the rest of the line is discarded
_REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line without its end.

    Attributes:
      text: the line, or its beginning if it is too long; invalid UTF-8 is read as U+FFFD.
      is_text: False if some bytes were invalid UTF-8.
    """

    text: str
    is_text: bool = True


class LineReader:
    """Reads lines that end with a line feed, or with a carriage return and a line feed.

    Args:
      path: path of the file, or "-" for standard input.

    Raises:
      OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._file: IO[Any] | None = None
        self._descriptor: int | None = None
        if path == STANDARD_INPUT:
            self._descriptor = sys.stdin.fileno()
        else:
            self._file = files.open(os.path.expanduser(path), streams=True)
        self._begun = bytearray()  # the beginning of a line whose end is not read yet
        self._is_whole = True
        self._lines: list[Line] = []
        self._has_ended = False

    def take(self, most: int) -> list[Line]:
        """Returns the available lines, at most `most`.

        Waits for the first line. Returns no lines at the end of the input.
        """
        while not self._has_ended and (
            not self._lines or (len(self._lines) < most and self._is_ready())
        ):
            self._add(self._read())
        taken, self._lines = self._lines[:most], self._lines[most:]
        return taken

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _is_ready(self) -> bool:
        if self._descriptor is None:
            return True
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def _read(self) -> bytes:
        if self._file is not None:
            data: bytes = self._file.read(_READ_BYTES)
            return data
        return os.read(self._descriptor or 0, _READ_BYTES)

    def _add(self, data: bytes) -> None:
        if not data:
            self._has_ended = True
            if self._begun:
                self._end_line()
            return
        *ended, begun = data.split(b"\n")
        for part in ended:
            self._extend(part)
            self._end_line()
        self._extend(begun)

    def _extend(self, part: bytes) -> None:
        room = _LONGEST_BYTES - len(self._begun)
        self._begun += part[:room]
        self._is_whole = self._is_whole and len(part) <= room

    def _end_line(self) -> None:
        data, is_whole = bytes(self._begun).removesuffix(b"\r"), self._is_whole
        self._begun, self._is_whole = bytearray(), True
        if not is_whole:  # the cut may be inside a character
            data = data.decode("utf-8", "ignore").encode("utf-8")
        text = data.decode("utf-8", "replace")
        is_text = _REPLACEMENT not in text or _REPLACEMENT.encode() in data
        self._lines.append(Line(text, is_text))
