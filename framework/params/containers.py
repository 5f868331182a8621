"""Values in Params: which of them are shared, copied or frozen.

A value is an atom (shared), a node (Params: one place in one tree) or a container of both. Params
store their own copies of lists, dicts and sets, so that outside code cannot change a tree by
accident.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

ATOMS: frozenset[type] = frozenset({int, float, bool, str, bytes, type(None), type})
CONTAINERS = (list, tuple, dict, set)


class FrozenParamsError(AttributeError):
    """Frozen Params cannot be changed."""


class Node:
    """Base of Params, by which containers distinguish nodes from leaves."""

    __slots__ = ()


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise FrozenParamsError(
        f"cannot change {type(self).__name__} {self!r}: it belongs to frozen Params; "
        "copy() of the Params returns an unfrozen copy"
    )


def _frozen(kind: type, *mutators: str) -> dict[str, Any]:
    """Returns the namespace of a subclass of a builtin container that rejects every mutator."""
    plain = {
        "__reduce__": lambda self: (type(self), (kind(self),)),
        "__copy__": lambda self: kind(self),
        "__deepcopy__": lambda self, memo: map_nodes(self, lambda node: node.copy()),
    }
    return {name: _refuse for name in mutators} | plain


FrozenList = type(
    "FrozenList",
    (list,),
    _frozen(
        list, "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert",
        "pop", "remove", "clear", "sort", "reverse",
    ),
)  # fmt: skip
FrozenDict = type(
    "FrozenDict",
    (dict,),
    _frozen(
        dict, "__setitem__", "__delitem__", "__ior__", "update", "setdefault", "pop", "popitem",
        "clear",
    ),
)  # fmt: skip
FrozenSet = type(
    "FrozenSet",
    (set,),
    _frozen(
        set, "add", "discard", "remove", "pop", "clear", "update", "intersection_update",
        "difference_update", "symmetric_difference_update", "__ior__", "__iand__", "__isub__",
        "__ixor__",
    ),
)  # fmt: skip


def is_atomic(value: Any) -> bool:
    """Returns whether a value is an atom or a tuple of atoms, so that trees can share it."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, value)))


def map_nodes(value: Any, fn: Callable[[Any], Any], *, frozen: bool = False) -> Any:
    """Returns a copy of `value` in which every node is replaced by `fn(node)`.

    Containers become plain containers of the same kind, or frozen ones if `frozen`.
    """
    if type(value) in ATOMS:
        return value
    if isinstance(value, Node):
        return fn(value)
    if isinstance(value, list):
        items = [map_nodes(item, fn, frozen=frozen) for item in value]
        return FrozenList(items) if frozen else items
    if type(value) is tuple:
        if is_atomic(value):
            return value
        return tuple([map_nodes(item, fn, frozen=frozen) for item in value])
    if isinstance(value, dict):
        pairs = {key: map_nodes(item, fn, frozen=frozen) for key, item in value.items()}
        return FrozenDict(pairs) if frozen else pairs
    if isinstance(value, set):
        return FrozenSet(value) if frozen else set(value)
    return value


def nodes_of(value: Any) -> Iterator[Any]:
    """Yields the nodes in a value and in its containers, but not the nodes below them."""
    if type(value) in ATOMS:
        return
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_of(item)


def holds_nodes(value: Any) -> bool:
    """Returns whether a value is or contains a node."""
    return next(nodes_of(value), None) is not None


def is_changeable(value: Any) -> bool:
    """Returns whether a value, or an item of a tuple, can be changed in place; nodes can."""
    if type(value) is tuple:
        return any(type(item) not in ATOMS and is_changeable(item) for item in value)
    return isinstance(value, (list, dict, set, Node))


def same_value(a: Any, b: Any) -> bool:
    """Returns whether two values are equal in type and value.

    1, 1.0 and True differ, 0.0 and -0.0 differ, and nan equals nan.
    """
    if a is b:
        return True
    kind = _plain_kind(a)
    if kind is not _plain_kind(b):
        return False
    if kind is float:
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        )
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if kind is dict:
        return (
            len(a) == len(b)
            and all(map(same_value, a, b))
            and all(map(same_value, a.values(), b.values()))
        )
    if kind in (set, frozenset):
        return len(a) == len(b) and all(any(same_value(x, y) for y in b) for x in a)
    try:
        return bool(a == b)
    except ValueError:  # an array has no truth value
        return False


def _plain_kind(value: Any) -> type:
    kind = type(value)
    if kind in (FrozenList, FrozenDict, FrozenSet):
        base: type = kind.__mro__[1]
        return base
    return kind
