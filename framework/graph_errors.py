"""Errors of ops in a traced function: the message, and the line of code that created the op.

TensorFlow writes the whole stack of that line into the message.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_MADE = re.compile(r"Detected at node [^\n]* defined at \(most recent call last\):\n")
_TEXT = re.compile(r"\n\n((?! *File)[^\n].*?)(?:\n\t \[\[|$)", re.DOTALL)
_FIRST = re.compile(r"\d+ root error\(s\) found\.\n +\(0\) [A-Z_]+: *")  # of several devices
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_WITHOUT_STACK = re.compile(r"(?:Graph execution error:\s*)?(\S.*?)\n\s*\[\[\{\{node .*", re.DOTALL)
_PLACE_OF = "tekso_place"  # attribute of an error whose message has no stack
NO_ROW = re.compile(r"indices\S* = (-?\d+) is not in \[0, (\d+)\)")
"""In the message of a lookup that fails: the id, and the number of rows of the table."""
NO_CLASS = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)
"""In the message of a sparse softmax cross-entropy: the label, and the number of classes."""
LABEL_VALUES = re.compile(r"\.\s+Label values: ([-\d\s]*)")
"""In the same message: all labels that the op was given."""
BEFORE_THAT = "before that, "
"""Beginning of a note of an error about a layer that returned before it."""
IN_PIECE = "in the piece "
"""Beginning of a note of an error about a name that a piece does not have."""
RESUMES = "the same command resumes from "
"""Begins the note of an error that ends a training run."""
_NAMES = re.compile(r"\{\{\w+ [^}]*\}\}\s*")


def parts(error: BaseException) -> tuple[str, str]:
    """Returns the message of an op that failed in a traced function, and the line that created it.

    A part that is unknown is "". The line is that of the user's code if there is any.
    """
    stacks = _MADE.split(str(error))
    is_lookup = any(kind.search(str(error)) for kind in (NO_ROW, NO_CLASS))
    # Others may be defects: see the whole error.
    if len(stacks) < 2 and is_lookup and (found := _WITHOUT_STACK.fullmatch(str(error))):
        text = LABEL_VALUES.sub("", _NAMES.sub("", found[1]).strip())
        return text, getattr(error, _PLACE_OF, "")
    if len(stacks) < 2 or (found := _TEXT.search(stacks[-1])) is None:
        return "", ""
    text = LABEL_VALUES.sub("", _NAMES.sub("", _FIRST.sub("", found[1])).strip())
    return text, place_in(
        (file, int(line), name) for file, line, name in _PLACE.findall(stacks[-1])
    )


def set_place(error: BaseException, place: str) -> None:
    """Gives the error of an op on a mesh, whose message has no stack, its place for `parts`."""
    setattr(error, _PLACE_OF, place)


def place_in(frames: Iterable[tuple[str, int, str]]) -> str:
    """Returns the line of the user's code in a stack, or else the last of Tekso; "": none.

    Args:
      frames: (file, line, function) of the stack, the innermost last.
    """
    places = [frame for frame in frames if not is_library_file(frame[0])]
    users = [place for place in places if not is_own_file(place[0])]
    if not places:
        return ""
    file, line, name = (users or places)[-1]
    return f"\n  (at {file}:{line}, in {name})" + code(file, line)


def rows_of_lookup(error: BaseException) -> int | None:
    """Returns the number of rows of the table in which a lookup failed; None: it is no lookup."""
    found = NO_ROW.search(str(error))
    return int(found[2]) if found is not None else None


def code(file: str, line: int) -> str:
    """Returns a line of code on a new line, or "" if it cannot be read."""
    text = linecache.getline(file, line).strip()
    return text and f"\n    {text}"


def is_own_file(file: str) -> bool:
    """Returns whether a file belongs to Tekso."""
    return file.startswith(_ROOT)


def is_library_file(file: str) -> bool:
    """Returns whether a file belongs to an installed package or to Python."""
    return "site-packages" in file or file.startswith((sysconfig.get_paths()["stdlib"], "<"))
