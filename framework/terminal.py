"""Leaves a terminal usable when a process ends at once, without its `finally` blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

_SHOW_CURSOR = b"\r\x1b[?25h\x1b[K\n"  # which a progress bar hides, on a line of its own


def restore(descriptors: Iterable[int] = (1, 2)) -> None:
    """Shows the cursor on the first of these file descriptors that is a terminal.

    It uses no stream and no lock, so that a signal handler may call it.
    """
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.isatty(descriptor):
                os.write(descriptor, _SHOW_CURSOR)
                return
