"""References: names of classes in the text of Params, "module:Qualified.Name".

A reference is looked up, and nothing is called. The reference of an owner of Params imports its
module, if it is Tekso's own or in a package that the user has named: a text may come from somebody
else, and importing a module runs its code. All other modules must already be imported, also those
of enums.
"""

from __future__ import annotations

import builtins
import enum
import importlib
import pathlib
import re
import sys
import types
from typing import Any

from tekso.framework.params.containers import Node
from tekso.framework.params.types import type_name

_BUILTINS: tuple[Any, ...] = (
    object, type, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, type(None),
)  # fmt: skip
_BUILTIN_CLASSES: dict[str, type] = {kind.__name__: kind for kind in _BUILTINS}

_OWN = ("tekso.framework", "tekso.models", "tekso.params", "tekso.tasks")
_ALLOWED: set[str] = set()
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_TYPED = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]")

RENAMED: dict[str, str] = {}
"""{former reference of a class: its present reference}; see `rename_class`."""


class NotImportedError(ValueError):
    """A reference names a class in a module that is not imported, and that it may not import.

    Args:
      reference: the reference.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self.module = reference.partition(":")[0]
        super().__init__(
            f"{reference!r}: the module {self.module} is not imported, and a text imports only "
            "modules of Tekso and of packages that you have named; import it first if you trust it"
        )


def import_advice(error: BaseException) -> str:
    """Returns what to do about an error if it is, or was caused by, a `NotImportedError`, or ""."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, NotImportedError):
        cause = cause.__cause__
    if cause is None:
        return ""
    if cause.module == "__main__":
        return f"{cause.reference} was defined in a script or notebook: run its definition first"
    package = cause.module.partition(".")[0]
    return (
        f"the module of {cause.reference} is not imported: add --import={package} (in Python: "
        f"import {package}) if you trust it"
    )


def rename_class(old: str, new: str) -> None:
    """Keeps texts of Params readable that name a class by its former module or name.

    Call it in the module that now contains the class, or in that of an experiment that uses it.

    Args:
      old: the former "module:Class".
      new: the present "module:Class".
    """
    RENAMED[old] = new


def allow_imports(package: str) -> None:
    """Allows references to import the modules of a package that the user has named."""
    _ALLOWED.add(package)


def allow_imports_in(text: str) -> None:
    """Allows references to import the modules that a text names which the user has typed."""
    _ALLOWED.update(_TYPED.findall(text))


def own_classes() -> dict[str, list[str]]:
    """Returns {name: references} of all classes of Tekso, without importing a module."""
    root = pathlib.Path(__file__).parents[2]
    found: dict[str, list[str]] = {}
    for package in _OWN:
        for path in sorted(root.joinpath(package.removeprefix("tekso.")).rglob("*.py")):
            module = ".".join(("tekso", *path.relative_to(root).with_suffix("").parts))
            for name in _CLASS.findall(path.read_text(encoding="utf-8")):
                reference = f"{module.removesuffix('.__init__')}:{name}"
                found.setdefault(name, []).append(reference)
    return found


def quote(text: str) -> str:
    """Returns a string literal in double quotes, on one line."""
    # The added double quote makes repr use single quotes; then the escapes are exchanged.
    inner = repr('"' + text)[2:-1].replace("\\'", "'").replace('"', '\\"')
    return f'"{inner}"'


def of_object(target: Any) -> str:
    """Returns the reference of a class, even if the reference cannot be resolved."""
    return f"{target.__module__}:{target.__qualname__}"


def of_params(cls: Any) -> str:
    """Returns the reference of a Params class: its owner's, if it is `owner.Params`, or its own."""
    owner = cls.owner
    if owner is not None and getattr(owner, "Params", None) is cls:
        return of_object(owner)
    return of_object(cls)


def of_class(target: type) -> str:
    """Returns the reference of a class.

    Raises:
      TypeError: the class cannot be read back from its reference.
    """
    if _BUILTIN_CLASSES.get(target.__name__) is target:
        return f"builtins:{target.__name__}"
    if _is_owner(target):
        return of_object(target)
    raise no_text_form(f"the class {type_name(target)}")


def no_text_form(what: str) -> TypeError:
    """Returns the error for a value that cannot be written as text."""
    return TypeError(
        f"{what} has no text form: use a class with Params instead, name it by a string, or "
        "give a plain Python value"
    )


def params(reference: str) -> Any:
    """Returns the Params class that a reference "module:Class" names, directly or by its owner.

    Raises:
      ValueError: there is no such class.
    """
    target = _find(RENAMED.get(reference, reference), may_import=True)
    if isinstance(target, type) and issubclass(target, Node):
        return target
    if _is_owner(target):
        return target.Params
    raise ValueError(f"{reference!r} has no Params of its own")


def class_named(reference: str) -> type:
    """Returns the class that a reference names: a builtin, or an owner of Params."""
    module, _, name = reference.partition(":")
    if module == "builtins" and name in _BUILTIN_CLASSES:
        return _BUILTIN_CLASSES[name]
    owner: Any = params(reference).owner
    if not isinstance(owner, type):
        raise ValueError(f"{reference!r} is not a class")
    return owner


def enum_class(reference: str) -> Any:
    """Returns the Enum class that a reference names; its module must already be imported."""
    target = _find(reference, may_import=False)
    if not (isinstance(target, type) and issubclass(target, enum.Enum)):
        raise ValueError(f"{reference!r} is not an Enum class")
    return target


def _is_owner(target: Any) -> bool:
    if not isinstance(target, type):
        return False
    cls = target.__dict__.get("Params")
    return isinstance(cls, type) and issubclass(cls, Node) and getattr(cls, "owner", None) is target


def _find(reference: str, *, may_import: bool) -> Any:
    """Looks up a reference in the namespaces of its module and classes."""
    module_name, separator, qualname = reference.partition(":")
    if not separator or not module_name or not qualname:
        raise ValueError(f'{reference!r} is not a reference: expected "module:Class"')
    if "<locals>" in qualname:
        raise ValueError(f"{reference!r} is defined in a function and cannot be found from text")
    module = sys.modules.get(module_name)
    if module is None and may_import and _is_allowed(module_name):
        module = _import(module_name, reference)
    if module is None:
        raise NotImportedError(reference)
    found: Any = module
    for name in qualname.split("."):
        found = _member(found, name)
        if found is None:
            raise ValueError(f"{reference!r}: {module_name} has no {qualname}")
    return found


def _is_allowed(module_name: str) -> bool:
    """Whether a reference may import a module."""
    return any(f"{module_name}.".startswith(f"{package}.") for package in (*_OWN, *_ALLOWED))


def _import(module_name: str, reference: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise ValueError(f"{reference!r}: there is no module {missing}") from None
        raise  # the module exists, but a module that it imports does not


def _member(home: Any, name: str) -> Any:
    """Returns an entry of a module or class namespace, without any `__getattr__` or property."""
    if isinstance(home, types.ModuleType):
        return vars(home).get(name) if home is not builtins else None
    if isinstance(home, type):
        for base in home.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return None
