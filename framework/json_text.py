"""JSON for other programs: numbers that are not finite are null, which every JSON parser reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Returns a value as JSON text.

    NaN and infinite numbers, for which JSON has no text, become null. NumPy scalars and arrays
    become numbers and lists.

    Args:
      value: numbers, texts, None, and lists, tuples and dicts of them.
      indent: spaces per level; None: all in one line.
      ensure_ascii: whether other characters are escaped.

    Raises:
      TypeError: a value has no JSON form.
    """
    return json.dumps(_plain(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of NumPy, which a command imports only where it needs it
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
