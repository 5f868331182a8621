"""Parses values of Params from the command line by the types of their fields.

dropout=0.1   name=abc   dims=2,3,5   dims=[2, 3]   padding=SAME   decay=None
optimizer=Adam   optimizer=their.module:Lion      (a child Params, named by its owner)
"""

from __future__ import annotations

import collections.abc
import contextlib
import enum
import re
import types
import typing
from typing import Any

from tekso.framework.params import literals, references
from tekso.framework.params.containers import Node, same_value
from tekso.framework.params.owners import params_of_number
from tekso.framework.params.types import (
    MismatchError,
    check,
    type_name,
    whole_number,
)
from tekso.framework.spelling import close_matches

_TRUTHS = {"true": True, "false": False}
_CALL = re.compile(r"([A-Za-z_]\w*)(?:\.Params)?\(.*\)", re.DOTALL)
_SEQUENCES = (list, tuple, set, frozenset)


def parse(annotation: Any, text: str) -> Any:
    """Returns the value of type `annotation` that a text describes.

    Raises:
      ValueError: the text does not describe such a value; the message says what is allowed.
    """
    references.allow_imports_in(text)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return parse(args[0], text)
    if isinstance(annotation, typing.NewType):
        return parse(annotation.__supertype__, text)
    if origin in (typing.Union, types.UnionType):
        return _union(annotation, args, text)
    if annotation is str:
        return _string(text)
    text = text.strip()
    if annotation in (Any, object) or isinstance(annotation, typing.TypeVar):
        return _anything(text)
    if annotation is bool:
        if text.lower() in _TRUTHS:
            return _TRUTHS[text.lower()]
        raise ValueError(f"must be True or False, given {text!r}")
    if annotation in (int, float):
        return _number(annotation, text)
    if origin is typing.Literal:
        return _choice(args, text)
    kind = origin or annotation
    if kind is type:
        return _checked(annotation, references.class_named(text), text)
    if isinstance(kind, type):
        if issubclass(kind, Node):
            return _params(kind, text)
        if issubclass(kind, enum.Enum):
            return _member(kind, text)
        if issubclass(kind, (*_SEQUENCES, collections.abc.Sequence)) and kind is not bytes:
            return _sequence(annotation, kind, args, text)
    try:
        value = literals.parse(text)
    except ValueError as error:
        raise ValueError(f"must be {type_name(annotation)}, given {text!r} ({error})") from None
    return _checked(annotation, _relaxed(annotation, value), text)


def _checked(annotation: Any, value: Any, text: str) -> Any:
    try:
        return check(annotation, value)
    except MismatchError as mismatch:
        raise ValueError(
            f"must be {type_name(annotation)}, given {text!r}{mismatch.reason()}"
        ) from None


def _string(text: str) -> str:
    """Returns the text, or the value of a string literal if the text is in quotes."""
    plain = text.strip()
    if len(plain) >= 2 and plain[0] == plain[-1] and plain[0] in "'\"":
        try:
            value = literals.parse(plain)
        except ValueError:
            return text
        if isinstance(value, str):
            return value
    return text


def _anything(text: str) -> Any:
    try:
        return literals.parse(text)
    except ValueError:
        return text


def _number(kind: Any, text: str) -> Any:
    try:
        if kind is int and text.lower().lstrip("+-").startswith(("0x", "0b", "0o")):
            return int(text, 0)
        return kind(text)
    except ValueError:
        hint = ""
        with contextlib.suppress(ValueError):
            hint = whole_number(float(text))
        message = f"must be {kind.__name__}, given {text!r}"
        raise ValueError(f"{message} ({hint})" if hint else message) from None


def _union(annotation: Any, members: tuple[Any, ...], text: str) -> Any:
    if type(None) in members and text.strip() == "None":
        return None
    if bool in members and text.strip().lower() in _TRUTHS:
        return _TRUTHS[text.strip().lower()]
    reasons = []
    rest = [member for member in members if member not in (type(None), bool, str)]
    for member in [*rest, *(member for member in members if member is str)]:
        try:
            return parse(member, text)
        except ValueError as error:
            reasons.append(str(error))
    if len(reasons) == 1:
        raise ValueError(f"{reasons[0]}{' (None is allowed)' if type(None) in members else ''}")
    raise ValueError(f"must be {type_name(annotation)}, given {text!r}")


def _choice(choices: tuple[Any, ...], text: str) -> Any:
    value = _anything(text)
    for choice in choices:
        if choice == text if isinstance(choice, str) else same_value(choice, value):
            return choice
    if value in choices and isinstance(value, str):
        return value
    raise ValueError(_unknown(text, [str(choice) for choice in choices]))


def _member(kind: Any, text: str) -> Any:
    name = text.removeprefix(f"{kind.__name__}.")
    if name in kind.__members__:
        return kind[name]
    raise ValueError(_unknown(text, list(kind.__members__)))


def _unknown(text: str, allowed: list[str]) -> str:
    close = close_matches(text, allowed, count=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(allowed)}, given {text!r}{hint}"


def _sequence(annotation: Any, kind: type, args: tuple[Any, ...], text: str) -> Any:
    """Returns a list, tuple or set from a literal, or from items separated by commas."""
    try:
        return _checked(annotation, _relaxed(annotation, literals.parse(text)), text)
    except ValueError as error:
        if text.startswith(("[", "(", "{", "set(", "frozenset(")) and text.endswith(
            ("]", ")", "}")
        ):
            raise ValueError(f"{error}{_quotes_hint(args, text)}") from None
    parts = [part.strip() for part in text.split(",")] if text else []
    if kind is tuple and args and args[-1] is not Ellipsis:
        kinds = list(args) + [Any] * (len(parts) - len(args))
    else:
        kinds = [args[0] if args else Any] * len(parts)
    items = [parse(item, part) for item, part in zip(kinds, parts, strict=False)]
    return _checked(annotation, _relaxed(annotation, items), text)


def _quotes_hint(args: tuple[Any, ...], text: str) -> str:
    """Returns a hint for errors if a shell has probably taken the quotes of texts in a list."""
    if str not in args or '"' in text or "'" in text:
        return ""
    items = ", ".join(f'"{item.strip()}"' for item in text[1:-1].split(","))
    return (
        "; texts in a list have quotes, which the shell removes unless the whole setting is in "
        f"single quotes: '…={text[0]}{items}{text[-1]}'"
    )


def _relaxed(annotation: Any, value: Any) -> Any:
    """Converts the containers in a literal to those of the type: (2, 3) to [2, 3] for a list."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    kind = origin or annotation
    if kind in _SEQUENCES and isinstance(value, (list, tuple, set, frozenset)):
        inner = args[0] if args and (kind is not tuple or args[-1] is Ellipsis) else None
        return kind([_relaxed(inner, item) if inner else item for item in value])
    if kind is dict and isinstance(value, dict) and len(args) == 2:
        return {key: _relaxed(args[1], item) for key, item in value.items()}
    return value


def _params(kind: Any, text: str) -> Any:
    """Returns new Params of the owner that the text names, by reference or by class name."""
    wanted = f"must be {type_name(kind)}"
    if text.startswith("Params("):
        cls = type(_checked(kind, literals.parse(text), text))
    elif ":" in text:
        try:
            cls = references.params(text)
        except ValueError as error:
            raise ValueError(f"{wanted}; {error}") from None
    else:
        cls = _loaded(kind, text.removesuffix(".Params"), wanted)
    if not issubclass(cls, kind):
        raise ValueError(f"{wanted}, given {text!r}, whose Params are {type_name(cls)}")
    return cls()


def _loaded(kind: Any, name: str, wanted: str) -> Any:
    """Returns the imported subclass of `kind` whose owner has the name; it must be unique."""
    found: dict[Any, str] = {}
    stack = [kind]
    while stack:
        cls = stack.pop()
        if cls.owner is not None and cls not in found:
            found[cls] = cls.owner.__name__
        stack += cls.__subclasses__()
    hits = [cls for cls, owner_name in found.items() if owner_name == name]
    if len(hits) == 1:
        return hits[0]
    if hits:
        listed = ", ".join(sorted(references.of_params(cls) for cls in hits))
        raise ValueError(f"{wanted}, given {name!r}, but several classes have this name: {listed}")
    own = references.own_classes()
    if len(subclasses := _subclasses(kind, own.get(name, []))) == 1:
        return subclasses[0]
    if of_number := _of_number(kind, name):
        raise ValueError(f"{wanted}, given {name!r}: {of_number}")
    if name == "None":
        raise ValueError(f"{wanted}, given None, which this setting cannot be")
    if called := _CALL.fullmatch(name):
        raise ValueError(
            f"{wanted}, given {name!r}: name only the class, …={called[1]}, and set its fields by "
            "their own paths, …=CLASS and ….FIELD=VALUE"
        )
    close = close_matches(name, sorted({*found.values(), *_similar(kind, name, own)}))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if fields := _fields_of_number(kind, name):
        raise ValueError(f"{wanted}, given {name!r}: set a field of it, such as {fields[0]}")
    raise ValueError(
        f'{wanted}, given {name!r}: no imported class has this name; write "module:Class"{hint}'
    )


def _of_number(kind: Any, text: str) -> str:
    """Returns what to write for a number where the class of a constant is allowed, or ""."""
    try:
        name = params_of_number(kind, _number(float, text))
    except ValueError:
        return ""
    if name is None:
        return ""
    return f"write {name}.Params(value={text}), or as settings …={name} and ….value={text}"


def _fields_of_number(kind: Any, text: str) -> list[str]:
    """Returns the fields of a class that take a number, if the text is one."""
    found = []
    for name, field in kind._fields.items():
        if field.type in (int, float):
            try:
                _number(field.type, text)
            except ValueError:
                continue
            found.append(name)
    return found


def _similar(kind: Any, name: str, own: dict[str, list[str]]) -> list[str]:
    """Returns similar names of owners in Tekso of subclasses of `kind`, also if not imported."""
    close = close_matches(name, own, count=10)
    return [one for one in close if _subclasses(kind, own[one])]


def _subclasses(kind: Any, names: list[str]) -> list[Any]:
    """Returns the subclasses of `kind` among the Params of classes, given by reference."""
    hits = []
    for reference in names:
        try:
            cls = references.params(reference)
        except (ValueError, ImportError):  # it has no Params, or needs a library that is missing
            continue
        if issubclass(cls, kind):
            hits.append(cls)
    return hits
