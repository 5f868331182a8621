"""Functions that are called again later, such as the body of a loop in its backward pass.

A function of Python reads the variables of the functions around it as they are when it is called.
By then, a loop has other values for them, or a name has another tensor:

    for i in range(2):
        x = ops.rematerialize(ctx, lambda theta, x, ctx: f(ctx.fold(i), x), theta, x)
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, cast

Function = Callable[..., Any]


def frozen(function: Function) -> Function:
    """Returns a copy of a function that reads its outer variables as they are now.

    So do the functions that it reads. Of lists, dicts and other objects, the copy reads the same
    ones: what they contain may still change.
    """
    return cast(Function, _frozen(function, {}))


def _frozen(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, functools.partial):
        return functools.partial(_frozen(value.func, known), *value.args, **value.keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType(_frozen(value.__func__, known), value.__self__)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    functools.update_wrapper(copy, value)
    known[id(value)] = copy  # it may call itself
    for cell, now in zip(cells, value.__closure__, strict=True):
        try:
            cell.cell_contents = _frozen(now.cell_contents, known)
        except ValueError:  # a variable without a value yet
            continue
    return copy
