"""Lines of a file or of standard input, taken as they come: one when there is one, many when many.

Whoever types a line gets it back at once; a file is read in large parts.
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
_LONGEST_BYTES = 1 << 20  # of a line; what is beyond is not kept
_REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line without its end.

    Attributes:
      text: what is in it, or its beginning; bytes that are no UTF-8 are U+FFFD.
      is_text: False if some bytes were no UTF-8.
    """

    text: str
    is_text: bool = True


class LineReader:
    """Reads lines that end with a line feed; a carriage return before it belongs to the end.

    Args:
      path: of the file, or "-" for standard input.

    Raises:
      OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._file: IO[Any] | None = None
        self._descriptor: int | None = None
        if path == STANDARD_INPUT:
            self._descriptor = sys.stdin.fileno()
        else:
            self._file = files.open(os.path.expanduser(path))
        self._begun = bytearray()  # of a line whose end has not come
        self._is_whole = True
        self._lines: list[Line] = []
        self._has_ended = False

    def take(self, most: int) -> list[Line]:
        """Returns the lines that are there, at most so many; waits for one; none: it has ended."""
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
        if not is_whole:  # it may end within a character
            data = data.decode("utf-8", "ignore").encode("utf-8")
        text = data.decode("utf-8", "replace")
        is_text = _REPLACEMENT not in text or _REPLACEMENT.encode() in data
        self._lines.append(Line(text, is_text))
