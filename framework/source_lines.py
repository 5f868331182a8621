"""Source lines of functions, for error messages about their results."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def line_of(function: Any) -> tuple[str, int] | None:
    """Returns file and line of a function or method, inside its decorators and `partial`s.

    None: the function is not written in Python.
    """
    function = inspect.unwrap(function)
    while isinstance(function, (functools.partial, functools.partialmethod)):
        function = inspect.unwrap(function.func)
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def place_of(function: Any) -> str:
    """Returns " (file:line)" of a function, to append to its name; "" if unknown."""
    line = line_of(function)
    return "" if line is None else f" ({line[0]}:{line[1]})"
