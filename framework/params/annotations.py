"""Types of fields as text, for the fields of `define`: `int`, `list[float] | None`, `Any`."""

from __future__ import annotations

import ast
import collections.abc
import enum
import types
import typing
from typing import Any

from tekso.framework.params import literals, references
from tekso.framework.params.containers import Node
from tekso.framework.params.types import type_name

_ORIGINS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "type": type,
    "Sequence": collections.abc.Sequence,
    "Mapping": collections.abc.Mapping,
}
_NAMES: dict[str, Any] = {
    "Any": Any,
    "object": object,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "Callable": collections.abc.Callable,
    **_ORIGINS,
}


def write(annotation: Any) -> str:
    """An annotation as an expression that `read` understands.

    Raises:
      TypeError: it has no text form.
    """
    if annotation is None or annotation is type(None):
        return "None"
    for name, known in _NAMES.items():
        if annotation is known:
            return name
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(write, args))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(literals.write, args))}]"
    if origin is collections.abc.Callable:
        return "Callable"
    for name, known in _ORIGINS.items():
        if origin is known and args:
            inner = ", ".join("..." if arg is Ellipsis else write(arg) for arg in args)
            return f"{name}[{inner}]"
    if isinstance(annotation, type):
        if issubclass(annotation, Node):
            return f"Params({references.quote(references.of_params(annotation))})"
        if issubclass(annotation, enum.Enum):
            return f"enum({references.quote(references.of_object(annotation))})"
        return f"cls({references.quote(references.of_object(annotation))})"
    raise TypeError(f"the type {type_name(annotation)} has no text form")


def read(node: ast.expr) -> Any:
    """The annotation that an expression means.

    Raises:
      ValueError: it means none.
    """
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return typing.Union[read(left), read(right)]  # noqa: UP007  # None | None is no union
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return typing.Literal[tuple(literals.read(item) for item in _items(inner))]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _ORIGINS:
            return _ORIGINS[name][tuple(_item(item) for item in _items(inner))]
        case ast.Call(func=ast.Name(id="Params"), args=[reference]):
            return references.params(literals.read(reference))
        case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=str(reference))]):
            if kind == "enum":
                return references.enum_class(reference)
            if kind == "cls":
                return references.loaded_class(reference)
    raise ValueError(f"{ast.unparse(node)} is no type")


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _item(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and node.value is ...:
        return ...
    return read(node)
