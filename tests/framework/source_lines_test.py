"""Where a function is written, whatever is wrapped around it."""

from __future__ import annotations

import functools
from typing import Any

from tekso.framework.source_lines import line_of, place_of


def plain(x: Any) -> Any:
    return x


@functools.wraps(plain)
def wrapped(x: Any) -> Any:
    return plain(x)


class Owner:
    """Has methods."""

    @classmethod
    def of_class(cls) -> None: ...

    method = functools.partial(wrapped, 3)


def test_lines_are_those_of_the_code_of_the_user() -> None:
    line = plain.__code__.co_firstlineno
    for function in (plain, wrapped, functools.partial(functools.partial(plain)), Owner().method):
        assert line_of(function) == (__file__, line)
        assert place_of(function) == f" ({__file__}:{line})"
    assert line_of(Owner.of_class) == (__file__, line + 12)


def test_what_is_not_written_in_python_has_no_line() -> None:
    assert line_of(len) is None and place_of(functools.partial(int)) == ""
