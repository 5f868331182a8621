"""Primitives: functions of the step context that executions can implement differently."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tekso.framework.context import PRIMITIVE_NAMES, StepContext

P = ParamSpec("P")
R = TypeVar("R")

PRIMITIVES: dict[str, Callable[..., Any]] = {}
"""{name: implementation for one device} of every primitive."""

PROPAGATED: set[str] = set()
"""Names of the primitives whose implementation for one device also works on a mesh."""


class Primitive(Generic[P, R]):
    """A function of a step context that an execution can implement differently.

    Attributes:
      plain: the implementation for one device.
    """

    def __init__(self, plain: Callable[Concatenate[Any, P], R]) -> None:
        self.plain = plain
        self._name = plain.__name__
        functools.update_wrapper(self, plain)
        PRIMITIVES[self._name] = plain
        PRIMITIVE_NAMES.add(self._name)

    def __call__(self, ctx: StepContext, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the implementation in `ctx.forms`, or `plain` if there is none."""
        form: Callable[..., R] = ctx.forms.get(self._name, self.plain)
        return form(ctx, *args, **kwargs)


def primitive(plain: Callable[Concatenate[Any, P], R]) -> Primitive[P, R]:
    """Declares a primitive by its implementation for one device; use it as a decorator.

    On a mesh it needs another implementation; see `execution/mesh/forms.py`.
    """
    return Primitive(plain)


def propagated_primitive(plain: Callable[Concatenate[Any, P], R]) -> Primitive[P, R]:
    """Declares a primitive whose plain implementation also works on a mesh.

    Its ops can be computed in parts, along the dims that DTensor propagates from its inputs.
    """
    PROPAGATED.add(plain.__name__)
    return Primitive(plain)


def methods_as_forms(kind: type[StepContext]) -> dict[str, Callable[..., Any]]:
    """Returns the methods of a context class that are named like primitives and implement them."""
    return {name: form for name, form in vars(kind).items() if name in PRIMITIVES}
