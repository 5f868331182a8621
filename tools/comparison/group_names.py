"""Names of groups of runs: the settings in which the groups differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_REFERENCE, _CLASS = re.compile(r'^Params\("[\w.]+:([\w.]+)"\)$'), r"\1"


def names(keys: Sequence[Any], paths: Sequence[str]) -> list[str]:
    """Returns the settings of each group, "" for none or more than 3.

    Args:
      keys: of each group, its experiment and its values of the fields.
      paths: paths of the fields.
    """
    short = _short_names(paths)
    result = []
    for _, *texts in keys:
        named = [
            f"{name}={_REFERENCE.sub(_CLASS, text)}"
            for name, text in zip(short, texts, strict=True)
            if text is not None
        ]
        result.append(", ".join(named) if len(named) <= 3 else "")
    return result


def _short_names(paths: Sequence[str]) -> list[str]:
    """Returns the shortest ends of paths that are distinct."""
    short = []
    for path in paths:
        parts = path.split(".")
        ends = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        alone = (e for e in ends if sum(p == e or p.endswith(f".{e}") for p in paths) == 1)
        short.append(next(alone, path))
    return short
