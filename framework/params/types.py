"""Types of Params fields: checks values against annotations.

The rules are Python's, with two conversions: a float field accepts an int, and a field of a Python
scalar accepts the NumPy scalar. A bool is not an int, and text is never a number.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from tekso.framework.params.containers import Node, same_value
from tekso.framework.params.owners import owners, params_of_number
from tekso.framework.spelling import close_matches

Checker = Callable[[Any], Any]


class Required:
    """The type of REQUIRED, the value of a field that has no default and is not set yet."""

    __slots__ = ()
    _only: Required | None = None

    def __new__(cls) -> Required:
        """Returns the only instance."""
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        """Returns its name."""
        return "REQUIRED"

    def __bool__(self) -> bool:
        """Raises an error: a missing value is neither true nor false."""
        raise TypeError("REQUIRED has no truth value: the field is not set yet")

    def __reduce__(self) -> str:
        """Pickles by name, so that it stays the only instance."""
        return "REQUIRED"


REQUIRED: Any = Required()


class MismatchError(Exception):
    """A value does not have the expected type; the text, if any, says where and why."""

    def inside(self, place: str) -> MismatchError:
        """Returns the mismatch of the container; `place` names the item."""
        return MismatchError(f"{place}: {self}" if str(self) else place)

    def reason(self) -> str:
        """Returns the text in brackets, for the end of a message; "" if there is no text."""
        return f" ({self})" if str(self) else ""


def type_name(annotation: Any) -> str:
    """Returns an annotation as it is written in code: `list[int] | None`, `Initializer.Params`."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__.rpartition("<locals>.")[2]
    if _is_union(annotation):
        return " | ".join(type_name(arg) for arg in typing.get_args(annotation))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is collections.abc.Callable:
        return "Callable"
    if origin is not None and args:
        inner = ", ".join("..." if arg is Ellipsis else type_name(arg) for arg in args)
        return f"{type_name(origin)}[{inner}]"
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def describe(value: Any) -> str:
    """Returns a value as text for an error: its type and the beginning of its repr."""
    if value is None or value is REQUIRED:
        return repr(value)
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        text = hex(value) if isinstance(value, int) else "…"
    text = text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, type):
        return f"the class {type_name(value)}"
    return f"{type_name(type(value))} {text}"


def check(annotation: Any, value: Any) -> Any:
    """Returns `value`, converted where the rules allow it.

    Raises:
      MismatchError: the value does not have the type.
    """
    if value is REQUIRED:
        return value
    return checker(annotation)(value)


def checker(annotation: Any) -> Checker:
    """Returns the function that checks values against an annotation; cached."""
    try:
        return _cached_checker(annotation)
    except TypeError:  # not hashable
        return _make_checker(annotation)


@functools.lru_cache(maxsize=None, typed=True)
def _cached_checker(annotation: Any) -> Checker:
    return _make_checker(annotation)


def _make_checker(annotation: Any) -> Checker:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return checker(args[0])
    if origin is typing.Literal:
        return _literal(args)
    if _is_union(annotation):
        return _union([checker(arg) for arg in args])
    if isinstance(annotation, typing.TypeVar):
        return checker(annotation.__bound__ or Any)
    if isinstance(annotation, typing.NewType):
        return checker(annotation.__supertype__)
    kind = origin or annotation
    if kind is collections.abc.Callable:
        return _callable
    if kind is type:
        return _class_of(args[0] if args else Any)
    if kind is tuple:
        return _tuple(args) if args or annotation is not tuple else _instance(tuple)
    if isinstance(kind, type):
        if issubclass(kind, collections.abc.Mapping):
            key, item = args if len(args) == 2 else (Any, Any)
            return _mapping(kind, checker(key), checker(item))
        if issubclass(kind, (list, set, frozenset)) or kind in _ITERABLES:
            return _items(kind, checker(args[0] if args else Any))
        return _instance(kind)
    raise TypeError(f"{annotation!r} cannot be the type of a Params field")


def item_annotation(annotation: Any, key: Any) -> Any:
    """Returns the annotation of item `key` of a container; Any if it is not annotated."""
    if _is_union(annotation):
        inner = [item_annotation(arg, key) for arg in typing.get_args(annotation)]
        return next((arg for arg in inner if arg is not Any), Any)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return args[key] if -len(args) <= key < len(args) else Any
    if isinstance(origin, type) and args and origin is not type:
        return args[-1] if issubclass(origin, collections.abc.Mapping) else args[0]
    return Any


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _without_numpy(value: Any) -> Any:
    """Returns the Python scalar of a NumPy scalar, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value


def _any(value: Any) -> Any:
    return value


def _none(value: Any) -> Any:
    if value is not None:
        raise MismatchError
    return value


def _bool(value: Any) -> Any:
    value = _without_numpy(value)
    if type(value) is not bool:
        raise MismatchError
    return value


def _int(value: Any) -> Any:
    if type(value) is int:
        return value
    value = _without_numpy(value)
    if isinstance(value, bool):
        raise MismatchError("a bool is not an int")
    if not isinstance(value, int):
        raise MismatchError(whole_number(value))
    return value


def whole_number(value: Any) -> str:
    """Returns what to write instead of a float that is a whole number, such as 1e3; else ""."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return f"write {int(value)}" if whole else ""


def _float(value: Any) -> Any:
    if type(value) is float:
        return value
    value = _without_numpy(value)
    if isinstance(value, bool):
        raise MismatchError("a bool is not a float")
    if isinstance(value, float):
        return value
    if not isinstance(value, int):
        raise MismatchError
    try:
        return float(value)
    except OverflowError:
        raise MismatchError("too large for a float") from None


def _str(value: Any) -> Any:
    if type(value) is str:
        return value
    value = _without_numpy(value)
    if not isinstance(value, str):
        raise MismatchError
    return value


def _callable(value: Any) -> Any:
    if not callable(value):
        raise MismatchError
    return value


_SCALARS: dict[Any, Checker] = {
    Any: _any, object: _any, None: _none, type(None): _none, bool: _bool, int: _int,
    float: _float, str: _str, typing.Callable: _callable, collections.abc.Callable: _callable,
}  # fmt: skip
_ITERABLES = (
    collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection,
    collections.abc.MutableSequence, collections.abc.Set,
)  # fmt: skip


def _instance(kind: type) -> Checker:
    def check_instance(value: Any) -> Any:
        try:
            if isinstance(value, kind):
                return value
        except TypeError:  # a protocol that cannot be checked at run time
            return value
        if isinstance(value, type) and issubclass(value, Node):
            raise MismatchError("a class: call it to create an instance")
        if isinstance(value, str) and issubclass(kind, enum.Enum):
            raise MismatchError(f"allowed: {', '.join(str(member) for member in kind)}")
        raise MismatchError(_params_instead(kind, value) if issubclass(kind, Node) else "")

    return check_instance


_FRAMEWORKS = {"keras": "Keras", "tf_keras": "Keras", "torch": "PyTorch", "optax": "Optax"}


def _params_instead(kind: type, value: Any) -> str:
    """Returns which Params to write instead of an owner, its class or its name; "" if unknown.

    An object of another framework, such as an optimizer of Keras, counts by the name of its class.
    """
    if isinstance(value, str):
        known = owners(kind)
        close = close_matches(value, known, count=1)
        return f"did you mean {type_name(known[close[0]])}()?" if close else ""
    if of_number := params_of_number(kind, value):
        return f"write {of_number}.Params(value={value!r})"
    own = getattr(value, "Params", None)
    if isinstance(own, type) and issubclass(own, kind):
        return f"write {type_name(own)}()"
    framework = type(value).__module__.partition(".")[0]
    if framework not in _FRAMEWORKS:
        return ""
    close = close_matches(type(value).__name__, known := owners(kind), count=1, cutoff=0.8)
    hint = (
        f"did you mean {type_name(known[close[0]])}(…)?" if close else "docs/keras_and_pytorch.md"
    )
    return f"of {_FRAMEWORKS[framework]}: {hint}"


def _literal(choices: tuple[Any, ...]) -> Checker:
    def check_literal(value: Any) -> Any:
        for choice in choices:
            if same_value(choice, value):
                return value
        names = [choice for choice in choices if isinstance(choice, str)]
        close = close_matches(value, names, count=1) if isinstance(value, str) else []
        raise MismatchError(f"did you mean {close[0]!r}?" if close else "")

    return check_literal


def _union(members: list[Checker]) -> Checker:
    def check_union(value: Any) -> Any:
        converted, reasons = [], []
        for member in members:
            try:
                result = member(value)
            except MismatchError as mismatch:
                reasons.append(mismatch)
                continue
            if same_value(result, value):
                return result
            converted.append(result)
        if not converted:
            raise MismatchError("; ".join(dict.fromkeys(str(r) for r in reasons if str(r))))
        return converted[0]

    return check_union


def _class_of(bound: Any) -> Checker:
    def check_class(value: Any) -> Any:
        if not isinstance(value, type):
            raise MismatchError
        if isinstance(bound, type) and bound is not Any and not issubclass(value, bound):
            raise MismatchError
        return value

    return check_class


def _items(kind: Any, item: Checker) -> Checker:
    def check_items(value: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, (str, bytes)):
            raise MismatchError
        items = []
        for index, element in enumerate(value):
            try:
                items.append(element if element is REQUIRED else item(element))
            except MismatchError as mismatch:
                raise mismatch.inside(f"item {index} is {describe(element)}") from None
        for builtin in (list, tuple, set, frozenset):
            if isinstance(value, builtin):
                return builtin(items)
        return value

    return check_items


def _tuple(args: tuple[Any, ...]) -> Checker:
    if args[-1:] == (Ellipsis,):
        return _items(tuple, checker(args[0]))
    parts = [] if args == ((),) else [checker(arg) for arg in args]

    def check_tuple(value: Any) -> Any:
        if not isinstance(value, tuple):
            raise MismatchError
        if len(value) != len(parts):
            raise MismatchError(f"{len(value)} items instead of {len(parts)}")
        items = []
        for index, (part, element) in enumerate(zip(parts, value, strict=True)):
            try:
                items.append(element if element is REQUIRED else part(element))
            except MismatchError as mismatch:
                raise mismatch.inside(f"item {index} is {describe(element)}") from None
        return tuple(items)

    return check_tuple


def _mapping(kind: Any, key: Checker, item: Checker) -> Checker:
    def check_mapping(value: Any) -> Any:
        if not isinstance(value, kind):
            raise MismatchError
        pairs = {}
        for name, element in value.items():
            try:
                name = key(name)
            except MismatchError as mismatch:
                raise mismatch.inside(f"key {describe(name)}") from None
            try:
                pairs[name] = element if element is REQUIRED else item(element)
            except MismatchError as mismatch:
                raise mismatch.inside(f"item {name!r} is {describe(element)}") from None
        return pairs

    return check_mapping
