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

    So do the functions within functions that it reads, or gets as defaults or arguments of a
    `partial`; those that share a variable still do. Of lists, dicts and other objects, the copy
    reads the same ones: what they contain may still change.
    """
    return cast(Function, _Frozen().copy(function))


class _Frozen:
    """Copies of functions and of their variables, by the ids of what was copied."""

    def __init__(self) -> None:
        self._functions: dict[int, Any] = {}
        self._cells: dict[int, types.CellType] = {}

    def copy(self, value: Any) -> Any:
        """Returns a frozen function, or a tuple with frozen functions; all else as it is."""
        if id(value) in self._functions:
            return self._functions[id(value)]
        if isinstance(value, functools.partial):
            keywords = {name: self.copy(one) for name, one in value.keywords.items()}
            return functools.partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.copy(value.__func__), value.__self__)
        if type(value) is tuple:
            return tuple(map(self.copy, value))
        if not isinstance(value, types.FunctionType):
            return value
        if "<locals>" not in value.__qualname__:  # of a module: it is compared with `is`
            return value
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return value
        closure = value.__closure__ or ()
        cells = tuple(self._cells.setdefault(id(cell), types.CellType()) for cell in closure)
        found = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        functools.update_wrapper(found, value)
        self._functions[id(value)] = found  # it may call itself
        found.__defaults__ = self.copy(value.__defaults__)
        kept = value.__kwdefaults__
        found.__kwdefaults__ = kept and {name: self.copy(one) for name, one in kept.items()}
        for cell, now in zip(cells, closure, strict=True):
            try:
                cell.cell_contents = self.copy(now.cell_contents)
            except ValueError:  # a variable without a value yet
                continue
        return found
