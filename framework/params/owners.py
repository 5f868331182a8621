"""Finds classes of Params by their owners."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def params_of_number(kind: type, value: Any) -> str | None:
    """Returns the name of the owner of the Params to write instead of a number: "Constant".

    It is the subclass whose only REQUIRED field is `value: float`: that in the module of `kind`, or
    else an imported one. None: there is none, or several, or the value is not a finite number.

    Args:
      kind: a class of Params, such as Schedule.Params.
      value: what was given instead of such Params.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    found: dict[str, bool] = {}  # {name: whether it is in the module of `kind`}
    for name, params in _owned(kind):
        fields: Any = getattr(params, "_fields", {})
        if [(f.name, f.type) for f in fields.values() if f.is_required] == [("value", float)]:
            found[name] = found.get(name, False) or params.__module__ == kind.__module__
    names = [name for name, is_near in found.items() if is_near] or list(found)
    return names[0] if len(names) == 1 else None


def owners(kind: type) -> dict[str, type]:
    """Returns {name of the owner: Params} of all imported subclasses of a class of Params."""
    found: dict[str, type] = {}
    for name, cls in _owned(kind):
        found.setdefault(name, cls)
    return found


def _owned(kind: type) -> Iterator[tuple[str, type]]:
    """Yields the owner's name and the class of all imported subclasses of a class of Params."""
    stack = [kind]
    while stack:
        cls = stack.pop()
        owner = getattr(cls, "owner", None)
        # A field of the Params may be named "owner".
        if isinstance(owner, type) and getattr(owner, "Params", None) is cls:
            yield owner.__name__, cls
        stack += cls.__subclasses__()
