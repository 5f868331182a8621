"""Literals: values of Params as Python expressions, written and read without loss.

    None True 3 0.1 -inf nan "text" b"bytes" [1, 2] (1,) {"a": 1} {1, 2} set() frozenset({1})
    REQUIRED  enum("module:Color", "RED")  tf_dtype("bfloat16")  Params("module:Owner")
    cls("module:Owner")  Params("module:Owner", {"module:Owner": 2}), with its version above 1

`ast` parses the text, and this module interprets each kind of syntax node. Nothing is evaluated,
and only the functions above are known. `references.py` says which modules a text may import.
"""

from __future__ import annotations

import ast
import enum
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from tekso.framework.params import references, versions
from tekso.framework.params.containers import CONTAINERS, Node
from tekso.framework.params.references import quote
from tekso.framework.params.types import REQUIRED, describe

_LONGEST = 2**20  # characters of a literal
_SHOWN = 200  # characters of a literal in an error
_PARAMS = "Params"


class Outdated(NamedTuple):
    """Params of a text that has earlier versions of their classes.

    Attributes:
      params: with the default values.
      stated: the versions of the text; see `versions.migrated`.
    """

    params: Any
    stated: dict[str, int]


def write(value: Any) -> str:
    """Returns a value as a literal.

    Raises:
      TypeError: the value has no literal.
    """
    if isinstance(value, Node):
        stated = versions.versions_of(type(value))
        more = f", {_write_container(stated)}" if stated else ""
        return f"Params({quote(references.of_params(type(value)))}{more})"
    if value is None or value is True or value is False or value is REQUIRED or value is ...:
        return "..." if value is ... else repr(value)
    if isinstance(value, enum.Enum):
        return _write_enum(value)
    kind = type(value)
    if kind is int:
        return repr(value) if -(10**30) < value < 10**30 else hex(value)
    if kind is float:
        return repr(value)  # the shortest text that reads back exactly; nan and inf are names
    if kind is str:
        return quote(value)
    if kind is bytes:
        return repr(value)
    if isinstance(value, CONTAINERS) or kind is frozenset:
        return _write_container(value)
    if isinstance(value, type):
        return f"cls({quote(references.of_class(value))})"
    if kind.__name__ == "DType" and kind.__module__.startswith("tensorflow"):
        return f"tf_dtype({quote(value.name)})"
    if callable(value) and hasattr(value, "__qualname__"):
        raise references.no_text_form(f"the function {value.__qualname__}")
    raise references.no_text_form(describe(value))


def _write_container(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write(key)}: {write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(write, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (set, frozenset)):
        items = "{" + ", ".join(sorted(map(write, value))) + "}" if value else ""
        if isinstance(value, frozenset):
            return f"frozenset({items})"
        return items or "set()"
    raise TypeError(f"{describe(value)} has no text form: use a plain tuple")


def _write_enum(value: enum.Enum) -> str:
    name = value.name
    if isinstance(value, enum.Flag):
        name = "|".join(str(member.name) for member in value)
    return f"enum({quote(references.of_object(type(value)))}, {quote(str(name))})"


def parse(text: str, *, outdated: list[Outdated] | None = None) -> Any:
    """Returns the value of a literal.

    Args:
      text: the literal.
      outdated: takes the Params whose fields in the text have to be migrated.

    Raises:
      ValueError: the text is not a literal, or a name in it cannot be resolved.
      NewerVersionError: the text has a version of Params that is newer than the class.
    """
    node = _expression(text)
    try:
        return _read(node, [] if outdated is None else outdated)
    except RecursionError:
        raise ValueError("the literal is nested too deeply") from None


@functools.lru_cache(maxsize=4096)  # a text of Params has most literals several times
def _expression(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ValueError(f"the literal has {len(text):,} characters; at most {_LONGEST:,} are read")
    try:
        with warnings.catch_warnings():  # about unknown escapes, and numbers such as 5in
            warnings.simplefilter("ignore")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{shown!r} is not a literal: {reason}") from None


def _read(node: ast.expr, outdated: list[Outdated]) -> Any:
    match node:
        case ast.Constant(value=value) if type(value) is not complex:
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _read(operand, outdated)
            if type(value) in (int, float):
                return -value
        case ast.List(elts=items):
            return [_read(item, outdated) for item in items]
        case ast.Tuple(elts=items):
            return tuple([_read(item, outdated) for item in items])
        case ast.Set(elts=items):
            return _hashed(set, items, outdated)
        case ast.Dict(keys=keys, values=items):
            pairs = {}
            for key, item in zip(keys, items, strict=True):
                if key is None:
                    raise ValueError("a literal cannot contain **")
                try:
                    pairs[_read(key, outdated)] = _read(item, outdated)
                except TypeError as error:
                    raise ValueError(
                        f"{ast.unparse(key)} cannot be a key of a dict: {error}"
                    ) from None
            return pairs
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            count, function = _FUNCTIONS[name]
            if len(args) in count:
                values = [_read(arg, outdated) for arg in args]
                return function(*values) if name != _PARAMS else _make_params(outdated, *values)
    raise ValueError(f"{ast.unparse(node)} is not a literal")


def _hashed(kind: Callable[[Any], Any], items: list[ast.expr], outdated: list[Outdated]) -> Any:
    try:
        return kind([_read(item, outdated) for item in items])
    except TypeError as error:
        raise ValueError(f"an item of a set cannot be hashed: {error}") from None


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a name must be in quotes, given {describe(value)}")
    return value


def _make_params(outdated: list[Outdated], reference: Any, stated: Any = None) -> Any:
    cls = references.params(_text(reference))
    known = versions.check_stated(cls, {} if stated is None else stated)
    new = cls()
    if versions.is_outdated(cls, known):
        outdated.append(Outdated(new, known))
    return new


def _class(reference: Any) -> Any:
    return references.class_named(_text(reference))


def _enum(reference: Any, name: Any) -> Any:
    kind = references.enum_class(_text(reference))
    try:
        if not issubclass(kind, enum.Flag):
            return kind[_text(name)]
        value = kind(0)
        for part in filter(None, _text(name).split("|")):
            value |= kind[part]
        return value
    except KeyError:
        names = ", ".join(member.name for member in kind)
        raise ValueError(f"{reference} has no member {name!r}; it has: {names}") from None


def _tf_dtype(name: Any) -> Any:
    import tensorflow as tf

    try:
        return tf.dtypes.as_dtype(_text(name))
    except TypeError as error:
        raise ValueError(f"{name!r} is not a TensorFlow dtype: {error}") from None


def _frozenset(items: Any = frozenset()) -> Any:
    if not isinstance(items, (set, frozenset)):
        raise ValueError(f"frozenset requires a set, given {describe(items)}")
    return frozenset(items)


_NAMES: dict[str, Any] = {"nan": math.nan, "inf": math.inf, "REQUIRED": REQUIRED}
_FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "set": ((0,), set),
    "frozenset": ((0, 1), _frozenset),
    "enum": ((2,), _enum),
    "tf_dtype": ((1,), _tf_dtype),
    "cls": ((1,), _class),
    _PARAMS: ((1, 2), _make_params),
}
