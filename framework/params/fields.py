"""Fields of Params: their declarations in a class, their types and their defaults.

Annotations are resolved at first use, not when the class is created. A field may therefore name a
class that is defined later, the enclosing class, or a class that is local to a function.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tekso.framework.params import references, versions
from tekso.framework.params import types as params_types
from tekso.framework.params.containers import ATOMS, Node, map_nodes, nodes_of
from tekso.framework.params.origins import caller, frame_outside, hide_from_origins
from tekso.framework.params.types import REQUIRED, MismatchError, describe, type_name

hide_from_origins(__file__)


def param(
    doc: str,
    *,
    default: Any = REQUIRED,
    old_names: Sequence[str] = (),
    old_values: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Declares a field in the body of a Params class.

    Args:
      doc: documentation of the field, usually one line.
      default: the value in a new instance; every instance gets its own copy.
      old_names: former names of the field; texts of Params that use them stay readable.
      old_values: {former value, a str: the value that replaces it}; for a child Params,
        {former reference "module:Class" of its owner: the present reference}.
    """
    field = Field(doc, default)
    field.old_names, field.old_values = tuple(old_names), dict(old_values)
    return field


class OldField(typing.NamedTuple):
    """A field that a Params class no longer has; texts of Params that contain it stay readable.

        class Params(Layer.Params):
            old_fields: ClassVar[dict[str, OldField]] = {"fast": OldField("set kernel instead")}

    Attributes:
      instead: what to do instead; part of the error message if the field is used.
      classes: {value of the field: reference "module:Class" of the class that replaces this one
        in texts with that value}. The other fields keep their values.
    """

    instead: str
    classes: Mapping[str, str] = types.MappingProxyType({})


class Field:
    """A field: name, type, doc and default. It is a data descriptor of its Params class."""

    __slots__ = (
        "_annotation",
        "_checker",
        "_scope",
        "declared_in",
        "default",
        "doc",
        "name",
        "old_names",
        "old_values",
    )

    def __init__(self, doc: str, default: Any) -> None:
        """Creates a field; `declare_fields` sets its name and type."""
        if not isinstance(doc, str) or not doc.strip():
            raise TypeError(f'a field needs a doc: param("What it is.", default=…), given {doc!r}')
        self.doc = doc
        self.default = default
        self.name = ""
        self.declared_in: Any = None
        self.old_names: tuple[str, ...] = ()
        self.old_values: dict[str, Any] = {}
        self._annotation: Any = None
        self._scope: dict[str, Any] = {}
        self._checker: params_types.Checker | None = None

    @property
    def type(self) -> Any:
        """The annotation, resolved at first use."""
        if isinstance(self._annotation, str):
            self._annotation = _resolve(self)
            self._scope = {}
        return self._annotation

    @property
    def is_required(self) -> bool:
        """Whether the field has no default."""
        return self.default is REQUIRED

    def check(self, value: Any) -> Any:
        """Returns `value`, converted where the rules allow it.

        Raises:
          MismatchError: the value does not have the type of the field.
        """
        if value is REQUIRED:
            return value
        if self._checker is None:
            self._checker = params_types.checker(self.type)
        return self._checker(value)

    def renewed(self, value: Any) -> Any:
        """Returns the replacement of a former value of the field; other values are unchanged."""
        if isinstance(value, Node):
            reference = self.old_values.get(references.of_params(type(value)))
            return value if reference is None else references.params(reference)()
        return self.old_values.get(value, value) if isinstance(value, str) else value

    def annotate(self, name: str, declared_in: Any, annotation: Any) -> None:
        """Sets the name and the (unresolved) type of a field that a class body declares."""
        self.name, self.declared_in, self._annotation = name, declared_in, annotation
        self._scope = _enclosing_names(annotation, declared_in)

    def inherit(self, other: Field) -> None:
        """Copies the name and type of the base class field that this field overrides."""
        self.name, self.declared_in = other.name, other.declared_in
        self._annotation, self._scope = other._annotation, dict(other._scope)
        self.old_names = self.old_names or other.old_names
        self.old_values = self.old_values or other.old_values

    def __get__(self, node: Any, owner: Any = None) -> Any:
        """Returns the value of the field in a node; on the class, returns the field."""
        if node is None:
            return self
        return node._values[self.name]

    def __set__(self, node: Any, value: Any) -> None:
        """Checks and stores a value."""
        node._assign(self.name, value, origin=caller())

    def __delete__(self, node: Any) -> None:
        """Raises an error: a field cannot be deleted."""
        raise AttributeError(f"{node._where(self.name)}: a field cannot be deleted")

    def __repr__(self) -> str:
        """Returns the name and the type."""
        shown = self._annotation
        return f"<Field {self.name}: {shown if isinstance(shown, str) else type_name(shown)}>"


class Template(typing.NamedTuple):
    """The initial values of an instance of a Params class."""

    values: dict[str, Any]
    copied: tuple[str, ...]  # names of values that every instance copies


def check_name(name: str, title: str, taken: type) -> None:
    """Checks that a name is valid for a field: a public identifier that Params does not use."""
    if not name.isidentifier() or name.startswith("_"):
        raise AttributeError(f"{title}: {name!r} is not a valid name of a field")
    if hasattr(taken, name):
        raise AttributeError(f"{title}: {name!r} is an attribute of Params; use another name")


def declare_fields(cls: Any, base_params: type) -> None:
    """Collects the fields of a class body into `cls._fields`.

    Raises:
      TypeError: a field has no doc or no type, a plain value hides a field, or a public attribute
        has no annotation.
      AttributeError: the name of a field is not valid.
    """
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields.update(base.__dict__.get("_own_fields", {}))
    own: dict[str, Field] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if name.startswith("_") or _is_class_var(annotation):
            continue
        field = cls.__dict__.get(name)
        if not isinstance(field, Field):
            shown = annotation if isinstance(annotation, str) else type_name(annotation)
            raise TypeError(
                f"{type_name(cls)}.{name} has no doc: write "
                f'{name}: {shown} = param("What it is.", default=…)'
            )
        check_name(name, type_name(cls), base_params)
        field.annotate(name, cls, annotation)
        own[name] = field
    for name, value in cls.__dict__.items():
        if name in own:
            continue
        if isinstance(value, Field):
            if name not in fields:
                raise TypeError(
                    f"{type_name(cls)}.{name} has no type: write {name}: TYPE = param(…)"
                )
            value.inherit(fields[name])
            own[name] = value
        elif name in fields:
            raise TypeError(
                f"{type_name(cls)}.{name} hides a field: to change its default, write "
                f"{name} = param({fields[name].doc!r}, default={value!r})"
            )
        elif _looks_like_a_field(cls, name, value, base_params):
            raise TypeError(
                f"{type_name(cls)}.{name} is no field, because it has no type: write {name}: "
                f'{type(value).__name__} = param("What it is.", default={value!r:.60}), or '
                f"{name}: ClassVar = … if all Params share it"
            )
    for field in own.values():
        field.default = map_nodes(field.default, _as_default)
    cls._own_fields = own
    cls._fields = {**fields, **own}


def _looks_like_a_field(cls: Any, name: str, value: Any, base_params: type) -> bool:
    """Whether a class body gives a public name a value, but no annotation."""
    return not (
        name.startswith("_")
        or name in versions.DECLARED
        or name in inspect.get_annotations(cls)
        or hasattr(base_params, name)
        or isinstance(value, type)
        or hasattr(value, "__get__")  # a method or a property
        or any(name in inspect.get_annotations(base) for base in cls.__mro__[1:])
    )


def make_template(cls: Any) -> Template:
    """Returns the initial values of a class, after checking its defaults.

    Raises:
      TypeError: a default does not have the type of its field, or a type cannot be resolved.
    """
    values: dict[str, Any] = {}
    for name, field in cls._fields.items():
        try:
            values[name] = field.check(field.default)
        except MismatchError as mismatch:
            raise TypeError(
                f"the default of {type_name(cls)}.{name} must be {type_name(field.type)}, "
                f"given {describe(field.default)}{mismatch.reason()}"
            ) from None
    return Template(values, tuple(name for name in values if type(values[name]) not in ATOMS))


def _as_default(node: Any) -> Any:
    """Returns a copy of a child in a default, without origins: its values are defaults, too."""
    copy = node._copy(None, None)
    _forget_origins(copy)
    return copy


def _forget_origins(node: Any) -> None:
    node._origins.clear()
    for value in node._values.values():
        for child in nodes_of(value):
            _forget_origins(child)


def _is_class_var(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)?ClassVar\b", annotation) is not None
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def _enclosing_names(annotation: Any, cls: Any) -> dict[str, Any]:
    """Returns the values that names in an annotation have in the scopes around the class.

    They are looked up while the enclosing functions run, because their scopes are gone later.
    """
    if not isinstance(annotation, str):
        return {}
    wanted = set(re.findall(r"[^\W\d]\w*", annotation))
    module = sys.modules.get(cls.__module__)
    outer = {**vars(builtins), **(vars(module) if module is not None else {})}
    found: dict[str, Any] = {}
    frame = frame_outside()
    scope = cls.__qualname__.rpartition(".")[0]
    while (
        frame is not None and scope and frame.f_code.co_qualname == scope.removesuffix(".<locals>")
    ):
        in_function = scope.endswith(".<locals>")
        for name in wanted & frame.f_locals.keys():
            if in_function or name not in outer:  # a class body hides no global, as in Python
                found.setdefault(name, frame.f_locals[name])
        frame = frame.f_back
        scope = scope.removesuffix(".<locals>").rpartition(".")[0]
    return found


def _resolve(field: Field) -> Any:
    """Returns the type that the text of an annotation names."""
    cls = field.declared_in
    module = sys.modules.get(cls.__module__)
    names = vars(module) if module is not None else {}
    scope = dict(field._scope)
    owner = getattr(cls, "owner", None)
    if owner is not None and owner.__name__ not in names:
        scope.setdefault(owner.__name__, owner)
    holder = types.SimpleNamespace(__annotations__={"it": field._annotation})
    try:
        return typing.get_type_hints(holder, globalns=names, localns=scope)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise TypeError(
            f"the type of {type_name(cls)}.{field.name}, {field._annotation!r}, cannot be "
            f"resolved: {error}. Its names must exist at run time, not only under "
            "`if TYPE_CHECKING`"
        ) from error
