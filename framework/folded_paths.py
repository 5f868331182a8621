"""Cells of tables that fold a path after a slash; imports rich, which is slow."""

from __future__ import annotations

import re
from typing import Any

from rich.containers import Lines
from rich.text import Text


class PathText(Text):
    """Text of a cell; if it has no spaces, it is folded after a slash where that is possible."""

    def wrap(self, console: Any, width: int, **options: Any) -> Lines:
        """Returns the lines of the text at a width."""
        if len(self.plain) <= width or " " in self.plain or "/" not in self.plain:
            return super().wrap(console, width, **options)
        lines = [""]
        for piece in re.findall(r"[^/]*/|[^/]+", self.plain):
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
        return Text("\n".join(lines)).wrap(console, width, **options)
