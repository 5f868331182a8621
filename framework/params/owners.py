"""Finds classes of Params by their owners."""

from __future__ import annotations

import math
from typing import Any


def params_of_number(kind: type, value: Any) -> str | None:
    """Returns the name of the owner of the Params to write instead of a number: "Constant".

    It is the imported subclass whose only REQUIRED field is `value: float`. None: there is none, or
    several, or the value is not a finite number.

    Args:
      kind: a class of Params, such as Schedule.Params.
      value: what was given instead of such Params.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    found = []
    for name, params in owners(kind).items():
        fields: Any = getattr(params, "_fields", {})
        required = [(f.name, f.type) for f in fields.values() if f.is_required]
        found += [name] if required == [("value", float)] else []
    return found[0] if len(found) == 1 else None


def owners(kind: type) -> dict[str, type]:
    """Returns {name of the owner: Params} of all imported subclasses of a class of Params."""
    found: dict[str, type] = {}
    stack = [kind]
    while stack:
        cls = stack.pop()
        owner = getattr(cls, "owner", None)
        if owner is not None and owner.Params is cls:
            found.setdefault(owner.__name__, cls)
        stack += cls.__subclasses__()
    return found
