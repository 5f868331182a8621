"""Origins of values: the file and line of the code that set them."""

from __future__ import annotations

import os
import sys
import types

Origin = str | tuple[str, int]

_OWN_FILES: set[str] = {__file__}


def hide_from_origins(file: str) -> None:
    """Excludes a file from origins, because its code only passes on values of its callers."""
    _OWN_FILES.add(file)


def frame_outside() -> types.FrameType | None:
    """Returns the nearest frame that is not in a hidden file."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame


def caller() -> Origin:
    """Returns the file and line of the nearest frame that is not in a hidden file."""
    frame = frame_outside()
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else "default"


def origin_text(origin: Origin) -> str:
    """Returns an origin as text; files in the working directory have relative paths."""
    if isinstance(origin, str):
        return origin
    file, line = origin
    if os.path.isabs(file):
        root = os.path.join(os.getcwd(), "")
        file = file.removeprefix(root)
    return f"{file}:{line}"
