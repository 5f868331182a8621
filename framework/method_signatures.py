"""Checks that methods which a user overrides take the arguments that they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tekso.framework.source_lines import place_of


def accepts(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Sequence[str]
) -> bool:
    """Returns whether a function can be called with arguments; True if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def check_methods(cls: type, base: type) -> None:
    """Checks the methods of a class that override those of a base class.

    Raises:
      TypeError: a method takes other arguments than that of the base, or takes them in another
        order, or is no classmethod although that of the base is one.
    """
    for name, method in vars(cls).items():
        wanted = vars(base).get(name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        place = f"{cls.__name__}.{name}{place_of(method)}"
        if isinstance(wanted, classmethod):
            text = f"def {name}{_text(wanted.__func__)}"
            raise TypeError(f"{place} must be a classmethod: write @classmethod above {text}")
        if not inspect.isfunction(wanted):
            continue
        parameters = inspect.signature(wanted).parameters.values()
        keywords = [one.name for one in parameters if one.kind == one.KEYWORD_ONLY]
        arguments = [one.name for one in parameters if one.name not in keywords]
        own = [one for one in inspect.signature(method).parameters if one in arguments]
        is_moved = own != [one for one in arguments if one in own]
        if is_moved or not accepts(method, arguments, keywords):
            raise TypeError(
                f"{place} is {name}{_text(method)}, but is called as {name}{_text(wanted)}"
            )


def _text(function: Callable[..., Any]) -> str:
    """Returns the names of the arguments of a function as text, in parentheses."""
    signature = inspect.signature(function)
    plain = [
        one.replace(annotation=one.empty, default=one.empty)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))
