"""Executes a notebook as Jupyter would, cell by cell, and prints the type of what each shows."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def run(path: str) -> None:
    """Executes all code cells in one namespace; the last expression of a cell is its output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(Path(path).read_text())["cells"]
    for number, cell in enumerate(c for c in cells if c["cell_type"] == "code"):
        tree = ast.parse("".join(cell["source"]), f"cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        shown: Any = None
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        html = getattr(shown, "_repr_html_", lambda: None)()
        picture = getattr(shown, "_repr_png_", lambda: None)()
        kinds = [k for k, v in (("html", html), ("png", picture)) if v]
        print(f"== cell {number}: {type(shown).__name__} {' '.join(kinds)}")
        print(repr(shown)[:2000] if html is None else html[:200_000])
        if picture:
            Path(f"cell_{number}.png").write_bytes(picture)


if __name__ == "__main__":
    run(sys.argv[1])
