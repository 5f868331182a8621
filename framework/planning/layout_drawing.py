"""Draws a mesh: device numbers, with the last axis to the right and the second last downwards.

    data ↓ │ model →  0  1  2  3
         0 │          0  1  2  3
         1 │          4  5  6  7

There is one picture for each position on the other axes. Of a long axis, only the first positions
and the last one are shown.
"""

from __future__ import annotations

import math

from tekso.framework.execution.mesh.rules import MeshShape

_COLUMNS, _ROWS, _PICTURES = 8, 5, 3  # maximum numbers of positions shown
_GAP = "…"


def draw(mesh: MeshShape, *, width: int = 100) -> list[str]:
    """Returns the lines of the drawing.

    Args:
      mesh: the axes.
      width: maximum number of columns; a small width shows fewer positions.
    """
    cell = len(str(mesh.size - 1)) + 2
    if len(mesh.axes) == 1:
        ((name, size),) = mesh.axes
        columns = _places(size, _fitting(cell, width - len(name) - 2))
        return [f"{name} →" + _row([_text(place) for place in columns], cell)]
    *outer, (down, num_rows), (across, num_columns) = mesh.axes
    label, header = len(down) + 2, f" │ {across} →"
    columns = _places(num_columns, _fitting(cell, width - label - len(header)))
    lines: list[str] = []
    for number in _places(math.prod(size for _, size in outer), _PICTURES):
        if number is None:
            lines += ["", _GAP]
            continue
        if outer:
            lines += [*([""] if lines else []), _place_of(number, outer)]
        first = number * num_rows * num_columns
        lines.append(f"{down} ↓{header}" + _row([_text(c) for c in columns], cell))
        for r in _places(num_rows, _ROWS):
            numbers = [
                _GAP if r is None or c is None else str(first + r * num_columns + c)
                for c in columns
            ]
            lines.append(f"{_text(r):>{label}} │{'':{len(header) - 2}}" + _row(numbers, cell))
    return lines


def _place_of(number: int, axes: list[tuple[str, int]]) -> str:
    """Returns the position of a picture on all axes but the last two: "pod 1, rack 0"."""
    names = []
    for name, size in reversed(axes):
        number, place = divmod(number, size)
        names.append(f"{name} {place}")
    return ", ".join(reversed(names))


def _row(texts: list[str], cell: int) -> str:
    return "".join(f"{text:>{cell}}" for text in texts)


def _fitting(cell: int, width: int) -> int:
    """Returns how many positions of an axis fit in addition to the last one."""
    return max(2, min(_COLUMNS, width // cell - 1))


def _places(size: int, most: int) -> list[int | None]:
    """Returns the positions of an axis to show; None marks a gap."""
    if size <= most + 1:
        return list(range(size))
    return [*range(most - 1), None, size - 1]


def _text(place: int | None) -> str:
    return _GAP if place is None else str(place)
