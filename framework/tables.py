"""Lays out tables as lines of text, by rich.

    weight        shape    bytes        Columns are two spaces apart, without rules.
    decoder/w     3 × 5      60 B       Figures are right-aligned.
      split over model                  A row may have a remark below it.

On a terminal, texts are folded so that lines fit, paths after a slash; figures never are.
Elsewhere lines have any length.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TextIO

_ANY_WIDTH = 100_000
_LEAST_TEXT = 12  # columns of a folded text
_GAP = 2
_RULE = "\x1f"  # between the rows that rich returns; a unit separator is in no text
_BOX = "\n".join(["    "] * 2 + [f" {_RULE}{_RULE} ", "    ", f" {_RULE}{_RULE} "] + ["    "] * 3)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Returns the columns of the terminal that a stream (default: stdout) writes to, at most 120.

    Returns None if the stream writes to a file or a pipe.
    """
    stream = stream or sys.stdout
    return min(shutil.get_terminal_size().columns, 120) if stream.isatty() else None


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    width: int | None = None,
    indent: str = "",
    remarks: Mapping[int, Sequence[str]] | None = None,
) -> list[str]:
    """Returns a table as lines, without escape sequences.

    Args:
      header: headings of the columns; empty: no headings.
      rows: the cells of each row.
      right: indices of the columns with figures, which are right-aligned and never folded.
      width: maximum number of columns of a line, exceeded only if the figures alone do not fit;
        None: no limit.
      indent: begins every line.
      remarks: {index of a row: lines below it}.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tekso.framework.folded_paths import PathText

    if not rows and not header:
        return []
    columns = list(zip(*([header] if header else []), *rows, strict=True))
    longest = [max(map(len, cells)) for cells in columns]
    least = sum(n if i in right else min(n, _LEAST_TEXT) for i, n in enumerate(longest))
    room = _ANY_WIDTH if width is None else width - len(indent)
    gap = _GAP if least + _GAP * (len(columns) - 1) <= room else 1
    found = Table(
        box=box.Box(_BOX), show_header=bool(header), show_edge=False, show_lines=True,
        pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="",
    )  # fmt: skip
    for number in range(len(columns)):
        found.add_column(
            Text(header[number]) if header else "",
            justify="right" if number in right else "left",
            no_wrap=number in right,
            overflow="fold",
        )
    for row in rows:
        found.add_row(*map(PathText, row))
    console = Console(
        file=io.StringIO(), width=max(room, least + gap * len(columns)), color_system=None,
        force_terminal=False, force_jupyter=False,
    )  # fmt: skip
    with console.capture() as capture:
        console.print(found)
    lines: list[str] = []
    number = 0 if header else 1
    for line in capture.get().splitlines():
        if _RULE not in line:
            lines.append(f"{indent}{line}".rstrip())
            continue
        lines += (remarks or {}).get(number - 1, [])
        number += 1
    return [*lines, *(remarks or {}).get(number - 1, [])]
