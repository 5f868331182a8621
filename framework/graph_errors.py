"""Errors of ops in a traced function: the message, and the line of code that created the op.

TensorFlow writes the whole stack of that line into the message.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_MADE = re.compile(r"Detected at node [^\n]* defined at \(most recent call last\):\n")
_TEXT = re.compile(r"\n\n((?! *File)[^\n].*?)(?:\n\t \[\[|$)", re.DOTALL)
_FIRST = re.compile(r"\d+ root error\(s\) found\.\n +\(0\) [A-Z_]+: *")  # of several devices
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_NAMES = re.compile(r"\{\{\w+ [^}]*\}\}\s*")


def parts(error: BaseException) -> tuple[str, str]:
    """Returns the message of an op that failed in a traced function, and the line that created it.

    A part that is unknown is "". The line is that of the user's code if there is any.
    """
    stacks = _MADE.split(str(error))
    if len(stacks) < 2 or (found := _TEXT.search(stacks[-1])) is None:
        return "", ""
    text = _NAMES.sub("", _FIRST.sub("", found[1])).strip()
    places = [
        (file, line, name)
        for file, line, name in _PLACE.findall(stacks[-1])
        if not is_library_file(file)
    ]
    users = [place for place in places if not place[0].startswith(_ROOT)]
    if not places:
        return text, ""
    file, line, name = (users or places)[-1]
    return text, f"\n  (at {file}:{line}, in {name})" + code(file, int(line))


def code(file: str, line: int) -> str:
    """Returns a line of code on a new line, or "" if it cannot be read."""
    text = linecache.getline(file, line).strip()
    return text and f"\n    {text}"


def is_library_file(file: str) -> bool:
    """Returns whether a file belongs to an installed package or to Python."""
    return "site-packages" in file or file.startswith((sysconfig.get_paths()["stdlib"], "<"))
