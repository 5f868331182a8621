"""Theta: the nested mapping of weight tensors that a layer's `fprop` takes.

It mirrors the layer tree: `theta.ffn.w` is the weight `w` of the child `ffn`. The flat form maps a
weight path ("ffn/w") to its tensor; checkpoints, learners and executions use that form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tekso.framework import foreign_methods
from tekso.framework.spelling import close_matches

SEPARATOR = "/"

T = TypeVar("T")


class Theta(dict[str, Any]):
    """A dict with attribute access; `tf.nest` and `tf.function` treat it as a mapping.

    Layers of a `child_list` are indexed by number: `theta.blocks[0]` is `theta.blocks["0"]`.
    """

    if TYPE_CHECKING:

        def __getitem__(self, name: str | int) -> Any: ...

    def __missing__(self, name: Any) -> Any:
        key = str(name) if isinstance(name, int) else name
        if key not in self:
            raise KeyError(f"theta has no {name!r}, only {sorted(self)}")
        return self[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            if name.startswith("__"):
                raise AttributeError(name) from None
            close = close_matches(name, self, count=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            hint += foreign_methods.build_hint(sys._getframe(1))
            raise AttributeError(f"theta has no {name!r}, only {sorted(self)}{hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"attributes of theta are read-only: {name!r} cannot be set")


def flatten(theta: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested mapping as {path: leaf}, in the same order."""
    flat: dict[str, Any] = {}
    for name, value in theta.items():
        path = f"{prefix}{SEPARATOR}{name}" if prefix else name
        if isinstance(value, Mapping):
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Theta:
    """Returns {path: leaf} as a nested theta."""
    root = Theta()
    for path, value in flat.items():
        node = root
        *parents, name = path.split(SEPARATOR)
        for parent in parents:
            node = node.setdefault(parent, Theta())
        node[name] = value
    return root


def map_leaves(function: Callable[[Any], T], theta: Mapping[str, Any]) -> Theta:
    """Returns a theta of the same structure with `function` applied to every leaf."""
    return Theta(
        (name, map_leaves(function, value) if isinstance(value, Mapping) else function(value))
        for name, value in theta.items()
    )
