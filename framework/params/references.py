"""References: names of classes in the text of Params, "module:Qualified.Name".

Reading a reference imports its module only where an owner of Params is named; the module of an
enum or a plain class has to be imported already. What is found is looked up, never called.
"""

from __future__ import annotations

import builtins
import enum
import importlib
import sys
import types
from typing import Any

from tekso.framework.params.containers import Node
from tekso.framework.params.types import type_name

_BUILTINS: tuple[Any, ...] = (
    object, type, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, type(None),
)  # fmt: skip
_BUILTIN_CLASSES: dict[str, type] = {kind.__name__: kind for kind in _BUILTINS}

RENAMED: dict[str, str] = {}
"""{reference of a class before: its reference now}: see `rename_class`."""


def rename_class(old: str, new: str) -> None:
    """Keeps texts of Params readable that name a class by its module or name of before.

    Call it where the class is now, or in the module of an experiment that uses it.

    Args:
      old: "module:Class" as it was.
      new: "module:Class" as it is.
    """
    RENAMED[old] = new


def quote(text: str) -> str:
    """A string literal in double quotes, on one line."""
    # With a double quote in it, repr takes single quotes; these are turned around.
    inner = repr('"' + text)[2:-1].replace("\\'", "'").replace('"', '\\"')
    return f'"{inner}"'


def of_object(target: Any) -> str:
    """The reference of a class; it may be one that nobody can resolve."""
    return f"{target.__module__}:{target.__qualname__}"


def of_params(cls: Any) -> str:
    """The reference of a Params class: that of its owner, or its own if it is not the owner's."""
    owner = cls.owner
    if owner is not None and getattr(owner, "Params", None) is cls:
        return of_object(owner)
    return of_object(cls)


def of_class(target: type) -> str:
    """The reference of a class.

    Raises:
      TypeError: reading it back would not give the class.
    """
    if _BUILTIN_CLASSES.get(target.__name__) is target:
        return f"builtins:{target.__name__}"
    if _is_owner(target):
        return of_object(target)
    raise no_text_form(f"the class {type_name(target)}")


def no_text_form(what: str) -> TypeError:
    """The error for a value that Params cannot be written with."""
    return TypeError(
        f"{what} has no text form: write a class with Params in its place, name it by a string, or "
        "give a plain Python value"
    )


def params(reference: str) -> Any:
    """The Params class that a reference "module:Class" names, itself or by its owner.

    Raises:
      ValueError: there is none.
    """
    target = _find(RENAMED.get(reference, reference), may_import=True)
    if isinstance(target, type) and issubclass(target, Node):
        return target
    if _is_owner(target):
        return target.Params
    raise ValueError(f"{reference!r} has no Params of its own")


def class_named(reference: str) -> type:
    """The class that a reference names: a builtin, or an owner of Params."""
    module, _, name = reference.partition(":")
    if module == "builtins" and name in _BUILTIN_CLASSES:
        return _BUILTIN_CLASSES[name]
    owner: Any = params(reference).owner
    if not isinstance(owner, type):
        raise ValueError(f"{reference!r} is no class")
    return owner


def enum_class(reference: str) -> Any:
    """The Enum class that a reference names; its module has to be imported already."""
    target = _find(reference, may_import=False)
    if not (isinstance(target, type) and issubclass(target, enum.Enum)):
        raise ValueError(f"{reference!r} is no Enum class")
    return target


def _is_owner(target: Any) -> bool:
    if not isinstance(target, type):
        return False
    cls = target.__dict__.get("Params")
    return isinstance(cls, type) and issubclass(cls, Node) and getattr(cls, "owner", None) is target


def _find(reference: str, *, may_import: bool) -> Any:
    """Looks a reference up in the namespaces of its module and classes."""
    module_name, separator, qualname = reference.partition(":")
    if not separator or not module_name or not qualname:
        raise ValueError(f'{reference!r} is no reference: it reads "module:Class"')
    if "<locals>" in qualname:
        raise ValueError(f"{reference!r} is defined in a function and cannot be found from text")
    module = sys.modules.get(module_name)
    if module is None and may_import:
        module = _import(module_name, reference)
    if module is None:
        raise ValueError(
            f"{reference!r}: the module {module_name} is not imported; import it first"
        )
    found: Any = module
    for name in qualname.split("."):
        found = _member(found, name)
        if found is None:
            raise ValueError(f"{reference!r}: {module_name} has no {qualname}")
    return found


def _import(module_name: str, reference: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise ValueError(f"{reference!r}: there is no module {missing}") from None
        raise  # the module is there and something that it imports is not


def _member(home: Any, name: str) -> Any:
    """An attribute from a module or class namespace, past any `__getattr__` or property."""
    if isinstance(home, types.ModuleType):
        return vars(home).get(name) if home is not builtins else None
    if isinstance(home, type):
        for base in home.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return None
