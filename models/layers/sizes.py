"""Sizes that a layer hands down to its children, so that an experiment writes each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from tekso.framework.params import REQUIRED, Configurable

P = TypeVar("P", bound=Configurable.Params)

WRAPPED = ("layer", "layers")
"""Fields in which a wrapper keeps the Params of what it wraps: a layer, or a list of them."""


def with_sizes(params: P, **sizes: int) -> P:
    """Returns a copy of a child's Params in which sizes that are still open are the parent's.

    A wrapper that has no field of a name passes it on to the layers that it wraps.

    Raises:
      ValueError: a size was set to another value than the parent's.
    """
    given = params.copy()
    for name, size in sizes.items():
        for holder in _holders(given, name):
            value = getattr(holder, name)
            if value is REQUIRED:
                holder.set({name: size})
            elif value != size:
                raise ValueError(
                    f"{type(holder).__qualname__}.{name} is {value}, but the layer that contains "
                    f"it works with {size}; leave it unset to take over that size"
                )
    return given


def _holders(params: Any, name: str) -> Iterator[Any]:
    fields = params.fields()
    if name in fields:
        yield params
        return
    for wrapped in WRAPPED:
        value = getattr(params, wrapped) if wrapped in fields else None
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, Configurable.Params):
                yield from _holders(inner, name)
