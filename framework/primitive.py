"""Primitives: functions of the step context that executions can implement differently."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from tekso.framework.context import PRIMITIVE_MODULES, Form, StepContext

P = ParamSpec("P")
R = TypeVar("R")

Table = Literal["mesh", "planning"]
"""The tables of forms: of mesh-sharded executions, and of the cost model, which records work."""

PRIMITIVES: dict[str, Primitive[..., Any]] = {}
"""{name: primitive} of every primitive."""


class Primitive(Generic[P, R]):
    """A function of a step context that an execution can implement differently.

    Args:
      plain: the implementation for one device.
      homes: where the forms of the tables are; see `primitive`.

    Attributes:
      plain: as given.
      homes: as given.
    """

    def __init__(
        self, plain: Callable[Concatenate[Any, P], R], homes: dict[Table, str | None]
    ) -> None:
        self.plain, self.homes = plain, homes
        self._name = plain.__name__
        functools.update_wrapper(self, plain)
        PRIMITIVES[self._name] = self
        PRIMITIVE_MODULES[self._name] = plain.__module__

    def __call__(self, ctx: StepContext, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the implementation in `ctx.forms`, or `plain` if there is none."""
        form: Callable[..., R] = ctx.forms.get(self._name, self.plain)
        return form(ctx, *args, **kwargs)

    def form(self, table: Table) -> Form | None:
        """Returns the form for a table; None if the plain form serves there.

        Raises:
          LookupError: the place named in the declaration has no function of this name.
        """
        home = self.homes[table]
        if home is None:
            return None
        module, _, within = home.partition(":")
        holder: Any = importlib.import_module(module)
        form: Form | None = vars(getattr(holder, within) if within else holder).get(self._name)
        if form is None:
            raise LookupError(
                f"primitive {self._name}: {home} has no function {self._name}, which @primitive("
                f"{table}=…) declares; write it there, with the arguments of the plain form"
            )
        return form


def primitive(
    *, mesh: str | None, planning: str | None
) -> Callable[[Callable[Concatenate[Any, P], R]], Primitive[P, R]]:
    """Declares a primitive by its implementation for one device; use it as a decorator.

        @primitive(mesh="my_lab.mesh_forms", planning=None)
        def my_op(ctx: StepContext, x: tf.Tensor) -> tf.Tensor: ...

    A place is a module, "package.module", or a class in it, "package.module:Class", that has a
    function with the name of the primitive. It is imported when the form is needed.

    Args:
      mesh: place of the form for meshes. None: the plain form is used; its ops can be computed on
        shards, along the dims that DTensor propagates from its inputs.
      planning: place of the form that records the primitive's work for the cost model. None: the
        ops of the plain form are read from the graph.
    """
    return lambda plain: Primitive(plain, {"mesh": mesh, "planning": planning})


def forms(table: Table) -> dict[str, Form]:
    """Returns {name: form} of the primitives whose plain form does not serve for a table."""
    found = {name: primitive.form(table) for name, primitive in PRIMITIVES.items()}
    return {name: form for name, form in found.items() if form is not None}
