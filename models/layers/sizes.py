"""Passes sizes from a layer to its children, so that an experiment sets each size once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from tekso.framework.params import REQUIRED, Configurable

P = TypeVar("P", bound=Configurable.Params)

WRAPPED = ("layer", "layers")
"""Fields in which a wrapper has the Params of the wrapped layer, or a list of them."""


def with_sizes(params: P, **sizes: int) -> P:
    """Returns a copy of a child's Params, with sizes that are not set taken from the parent.

    If a wrapper does not have a field of that name, its wrapped layers get the size.

    Raises:
      ValueError: a size is set to another value than the parent's.
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
                    f"it has {size}; leave it unset to use {size}"
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
