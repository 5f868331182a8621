"""Assigns values in a Params tree: checks types, keeps one parent per node, and can roll back.

A transaction logs how to undo each step. If a step fails, all steps are undone. The tree then has
its former values and its former child objects, so references to the children stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tekso.framework.params import tree as params_tree
from tekso.framework.params.containers import FrozenParamsError, is_atomic, map_nodes, nodes_of
from tekso.framework.params.origins import Origin, hide_from_origins
from tekso.framework.params.types import MismatchError, describe, type_name

hide_from_origins(__file__)

Log = list[Callable[[], None]]
_MISSING: Any = object()


def transact(
    root: Any,
    items: Iterable[tuple[str, Any]],
    assign: Callable[[params_tree.Location, Any, Log], None],
) -> None:
    """Calls `assign` for every location that a path matches; rolls back if a call fails.

    Raises:
      TypeError: a path is no text.
    """
    log: Log = []
    try:
        for path, value in items:
            if not isinstance(path, str):
                raise TypeError(f"a path of Params is a str, such as 'run.steps', given {path!r}")
            for place in params_tree.places(root, path):
                assign(place, value, log)
    except BaseException:
        for undo in reversed(log):
            undo()
        raise


def assign(
    node: Any,
    name: str,
    value: Any,
    *,
    origin: Origin | None,
    keys: tuple[Any, ...] = (),
    log: Log | None = None,
) -> None:
    """Checks and stores a value or, with `keys`, an item of the container in a field.

    Raises:
      AttributeError: there is no such field, or the node is frozen.
      TypeError: the value does not have the type of the field.
      ValueError: the value contains the node itself.
    """
    field = node._field(name)
    if field is None:
        raise node._unknown(name)
    if node._frozen:
        raise FrozenParamsError(
            f"cannot set {node._where(name)}: {node._title()} is frozen; copy() returns an "
            "unfrozen copy"
        )
    values, origins = node._values, node._origins
    old = values.get(name)
    stored = params_tree.with_item(old, keys, value) if keys else value
    try:
        stored = field.check(stored)
    except MismatchError as mismatch:
        raise TypeError(
            f"{node._where(name)}: must be {type_name(field.type)}, given {describe(stored)}"
            f"{mismatch.reason()}{_renewed(field, value)}"
        ) from None
    if log is not None:
        log.append(_undo(values, name))
        log.append(_undo(origins, name))
    if not (is_atomic(stored) and is_atomic(old)):
        stored = _adopt(node, name, old, stored, log)
    values[name] = stored
    if origin is None:
        origins.pop(name, None)
    else:
        origins[name] = origin


def _renewed(field: Any, value: Any) -> str:
    """Returns a hint for an error: the replacement of a former value; "" for other values."""
    new = field.renewed(value)
    return "" if new is value else f"; use {describe(new)} instead"


def _undo(table: dict[str, Any], name: str) -> Callable[[], None]:
    old = table.get(name, _MISSING)

    def undo() -> None:
        if old is _MISSING:
            table.pop(name, None)
        else:
            table[name] = old

    return undo


def _adopt(parent: Any, name: str, old: Any, value: Any, log: Log | None) -> Any:
    """Returns `value` with `parent` as the parent of its nodes; detaches the nodes of `old`."""
    kept = {id(node) for node in nodes_of(old)}
    seen: set[int] = set()

    def take(node: Any) -> Any:
        above = parent
        while above is not None:
            if above is node:
                raise ValueError(f"{parent._where(name)}: Params cannot contain themselves")
            above = above._parent
        if id(node) in kept and node._parent is parent and id(node) not in seen:
            seen.add(id(node))
            return node
        if node._parent is not None or node._frozen:
            return node._copy(parent, None)
        seen.add(id(node))
        _set_parent(node, parent, log)
        return node

    result = map_nodes(value, take)
    for node in nodes_of(old):
        if id(node) not in seen and node._parent is parent:
            _set_parent(node, None, log)
    return result


def _set_parent(node: Any, parent: Any, log: Log | None) -> None:
    old = node._parent
    if log is not None:
        log.append(lambda: node._set_parent(old))
    node._set_parent(parent)
