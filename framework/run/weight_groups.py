"""Groups weights that differ only in the index of their layer, to show them as one row."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_INDEX = re.compile(r"(?<=/)\d+(?=/)")  # index of a layer in a path
_WIDEST = 12  # characters of the ranges of indices


def groups(
    items: Iterable[T], path: Callable[[T], str], other: Callable[[T], Hashable]
) -> list[list[T]]:
    """Returns groups of items that are equal except for indices in their paths, in first order.

    Args:
      items: the items.
      path: returns the path of an item.
      other: returns everything else that the items of a group have in common.
    """
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault((_INDEX.sub("*", path(item)), other(item)), []).append(item)
    return list(found.values())


def joined(paths: Iterable[str]) -> str:
    """Returns the path of a group, with ranges of indices: "stack/layers/{0-3}/ffn/w"."""
    parts = [path.split("/") for path in paths]
    return "/".join(_numbers(part) for part in zip(*parts, strict=True))


def _numbers(texts: Sequence[str]) -> str:
    if len(set(texts)) == 1:
        return texts[0]
    numbers = sorted({int(text) for text in texts})
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    text = ",".join(runs)
    return "{" + (text if len(text) <= _WIDEST else f"{len(numbers)} layers") + "}"
