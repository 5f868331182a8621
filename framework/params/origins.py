"""Where a value was set: file and line of the code that called into Params."""

from __future__ import annotations

import os
import sys
import types

Origin = str | tuple[str, int]

_OWN_FILES: set[str] = {__file__}


def hide_from_origins(file: str) -> None:
    """Skips a file when origins are looked up, as no place where a person sets a value."""
    _OWN_FILES.add(file)


def frame_outside() -> types.FrameType | None:
    """The nearest frame that is not in a hidden file."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame


def caller() -> Origin:
    """File and line of the nearest code that is not hidden."""
    frame = frame_outside()
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else "default"


def origin_text(origin: Origin) -> str:
    """An origin as text; a file below the working directory is given relative to it."""
    if isinstance(origin, str):
        return origin
    file, line = origin
    if os.path.isabs(file):
        root = os.path.join(os.getcwd(), "")
        file = file.removeprefix(root)
    return f"{file}:{line}"
