"""Reads text that somebody else may have written: its size is checked before it is read."""

from __future__ import annotations

import json
from typing import Any

from tekso.framework import files

LONGEST = 64 * 2**20  # bytes of a text file of a run
_MOST_DIGITS = 300  # of a whole number; one of more than 308 is no float


def read(path: str) -> bytes:
    """Returns the bytes of a file.

    Raises:
      ValueError: it is longer than `LONGEST`.
    """
    size = files.size_bytes(path)
    if size > LONGEST:
        raise ValueError(f"{path} has {size:,} bytes; at most {LONGEST:,} are read")
    return files.read(path, 0, LONGEST)


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
      ValueError: the text is not JSON, or nested too deeply, or a number is too long.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number in the JSON text has {len(text):,} digits")
    return int(text)


def read_json(path: str) -> Any:
    """Returns the value in a JSON file; raises as `read` and `parse_json`."""
    return parse_json(read(path))
