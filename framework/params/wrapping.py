"""Params of callables and classes from outside, made from their signatures."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from tekso.framework.params import Params, references
from tekso.framework.params.containers import Node, map_nodes
from tekso.framework.params.fields import param
from tekso.framework.params.origins import frame_outside, hide_from_origins
from tekso.framework.params.types import REQUIRED, MismatchError, check, type_name

hide_from_origins(__file__)


def wrapped(target: Callable[..., Any]) -> type[Any]:
    """The Params class of a target; the same target always gives the same class.

    Raises:
      TypeError: it is not callable, has no signature, or an argument has a name that no field can
        have.
    """
    if not callable(target):
        raise TypeError(f"wrap() takes a callable or a class, given {target!r}")
    own = getattr(target, "Params", None)
    if isinstance(own, type) and issubclass(own, Node) and getattr(own, "owner", None) is target:
        return own  # configurable already
    reference = _reference(target)
    known = references.WRAPPED.get(reference)
    if known is not None and known.owner is target:
        return known  # type: ignore[no-any-return]
    cls = _make_class(target, reference)
    frame = frame_outside()
    references.WRAPPED[reference] = cls
    references.WRAPPED_IN[reference] = frame.f_globals.get("__name__", "") if frame else ""
    return cls


class _Wrapped(Params):
    """Base of what `wrap` makes; the owner takes arguments and not Params."""

    def _build(self, kwargs: dict[str, Any]) -> Any:
        positional, named = [], {}
        for name, argument in _arguments(self.owner).items():
            value = _plain(self._values[name], self._fields[name].type)
            if argument.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[name] = value
        named.update({name: _plain(self._values[name], Any) for name in self._extra})
        return self.owner(*positional, **{**named, **kwargs})


def _plain(value: Any, annotation: Any) -> Any:
    """What the outside understands: plain containers, and children built, not as Params."""
    if isinstance(annotation, type) and issubclass(annotation, Node):
        return value
    return map_nodes(value, lambda node: node.instantiate())


def _reference(target: Any) -> str:
    try:
        return references.of_object(target)
    except AttributeError:
        raise TypeError(
            f"wrap() takes a function or a class, given {target!r}, which has no name; write a "
            "function around it"
        ) from None


def _arguments(target: Any) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(target).parameters
    except (ValueError, TypeError):
        raise TypeError(
            f"{target!r} does not tell its signature; wrap a function with annotated arguments "
            "that calls it"
        ) from None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in parameters.items() if p.kind not in variable}


def _make_class(target: Any, reference: str) -> type[Any]:
    hints = _hints(target)
    namespace: dict[str, Any] = {
        "__doc__": f"Params of {reference}, from its signature.",
        "__module__": target.__module__,
        "__qualname__": f"wrap({target.__qualname__})",
        "__annotations__": {},
        "owner": staticmethod(target),
        "_is_wrapped": True,
    }
    for name, argument in _arguments(target).items():
        default = argument.default if argument.default is not argument.empty else REQUIRED
        doc = f"Argument {name} of {type_name(target) if isinstance(target, type) else reference}."
        namespace["__annotations__"][name] = _annotation(hints.get(name, Any), default)
        namespace[name] = param(doc, default=default)
    try:
        return type(f"wrap({target.__name__})", (_Wrapped,), namespace)
    except AttributeError as error:
        raise TypeError(f"cannot wrap {reference}: {error}") from None


def _hints(target: Any) -> dict[str, Any]:
    try:
        function: Any = target
        if isinstance(target, type):
            function = getattr(target, "__init__")  # noqa: B009
        return typing.get_type_hints(function)
    except Exception:  # annotations from outside may name anything, or nothing that is there
        return {}


def _annotation(annotation: Any, default: Any) -> Any:
    """The annotation if the default fits it; `x: int = None` means int or None."""
    for candidate in (annotation, typing.Optional[annotation]):  # noqa: UP045
        try:
            check(candidate, default)
            return candidate
        except MismatchError:
            continue
        except TypeError:  # an annotation that means nothing here
            return Any
    return Any
