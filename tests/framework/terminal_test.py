"""A terminal shows its cursor after an exit at once; files and pipes stay as they are."""

from __future__ import annotations

import os
import pty
from pathlib import Path

from tekso.framework import terminal


def test_the_cursor_is_shown_on_the_first_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with open(tmp_path / "file", "wb") as file:
        try:
            terminal.restore((file.fileno(), theirs))
            written = os.read(ours, 100)
        finally:
            os.close(ours)
            os.close(theirs)
    assert b"\x1b[?25h" in written and written.endswith(b"\n")
    assert (tmp_path / "file").read_bytes() == b""
