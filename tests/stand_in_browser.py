"""Writes programs that take the place of a browser in tests: no test machine needs one."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -E
import json, pathlib, shutil, signal, sys, urllib.request

here = pathlib.Path(__file__)
flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:-1])
pathlib.Path(flags["user-data-dir"]).mkdir()
with urllib.request.urlopen(sys.argv[-1], timeout=60) as answer:
    record = {{"flags": flags, "url": sys.argv[-1], "code": answer.status}}
    record["page"] = answer.read().decode()
with here.with_suffix(".jsonl").open("a") as file:
    file.write(json.dumps(record) + "\\n")
print("first line\\n{last_line}\\n", file=sys.stderr, flush=True)
{end}
"""

SHOOTS = 'shutil.copy(here.with_suffix(".png"), flags["screenshot"])'
"""The last lines of a browser that works."""


def write(
    folder: Path, *, picture: bytes = b"", end: str = SHOOTS, last_line: str = "last line"
) -> Path:
    """Writes a browser, which requests the page that it is given; returns its path.

    Args:
      folder: where the program and its files are written.
      picture: its screenshot of every page.
      end: the last lines of the program.
      last_line: its last line on stderr.
    """
    path = folder / "browser"
    path.with_suffix(".png").write_bytes(picture)
    path.write_text(_PROGRAM.format(python=sys.executable, end=end, last_line=last_line))
    path.chmod(0o755)
    return path


def requests(path: Path) -> list[dict[str, Any]]:
    """Returns what a browser was asked for: flags, url, and the code and page of the answer."""
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def png(width: int, height: int, *, blank: bool = False) -> bytes:
    """Returns a picture of one or two colours."""
    from PIL import Image

    image = Image.new("RGB", (width, height), "white")
    if not blank:
        image.putpixel((1, 2), (200, 100, 0))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
