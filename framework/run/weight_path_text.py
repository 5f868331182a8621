"""Paths of weights as text: layers of a stack as one path, and patterns that match paths."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence

from tekso.framework.theta import SEPARATOR

_MOST_PATTERNS = 3
_ADAPTER = re.compile(r"_lora_[ab]$")


def numberless(path: str) -> str:
    """Returns a path with * instead of the numbers of layers, and of rows of a stack."""
    return re.sub(r"(?<=/)\d+(?=/)|(?<=\[)\d+(?=\])", "*", path)


def numbered(paths: Sequence[str]) -> str:
    """Returns paths that differ in numbers alone as one, such as layers/0-3,7/w."""
    columns = zip(*(path.split(SEPARATOR) for path in paths), strict=True)
    return SEPARATOR.join(
        parts[0] if len(set(parts)) == 1 else _ranges(sorted({int(part) for part in parts}))
        for parts in columns
    )


def mixed(sources: Mapping[str, str]) -> set[str]:
    """Returns the paths without numbers whose layers have different sources, {path: source}."""
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        found.setdefault(numberless(path), set()).add(source)
    return {path for path, names in found.items() if len(names) > 1}


def some(paths: Sequence[str], mixed: Container[str], most: int = 6) -> str:
    """Returns the first paths, and the number of the others.

    Args:
      paths: of weights.
      mixed: paths without numbers that are shown with the numbers of their layers.
      most: how many are shown.
    """
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(numberless(path), []).append(path)
    shown = [numbered(own) if path in mixed else path for path, own in groups.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"{', '.join(shown[:most])}{more}"


def patterns(paths: Sequence[str]) -> str:
    """Returns a list of patterns that match paths, as text; one pattern for all adapters."""
    if all(_ADAPTER.search(path) for path in paths):
        return '[".*_lora_[ab]"]'
    shown = list(dict.fromkeys(map(_pattern, paths)))
    return json.dumps(shown) if len(shown) <= _MOST_PATTERNS else '["PATTERN"]'


def _ranges(numbers: Sequence[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in found)


def _pattern(path: str) -> str:
    start, _, name = path.rpartition(SEPARATOR)
    return f".*/{re.escape(name)}" if start else re.escape(name)
