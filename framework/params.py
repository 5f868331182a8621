"""Params: typed, nested, documented configuration.

A `Params` class is nested in the class that it configures, its owner:

    class Linear(Layer):
        class Params(Layer.Params):
            \"\"\"Params of Linear.\"\"\"

            input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
            use_bias: bool = param("Whether to add a bias.", default=True)

    linear = Linear.Params(input_dim=3).set(use_bias=False).instantiate()

Every field has a type that is checked, a line that documents it, and a default or REQUIRED; every
value knows where it was set. A tree of Params is changed by dotted paths, all or nothing, frozen
in depth, compared, and written as text that reads back without loss.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from tekso.framework import params_paths as paths
from tekso.framework import params_types
from tekso.framework.params_containers import (
    ATOMS,
    CONTAINERS,
    FrozenParamsError,
    Node,
    holds_nodes,
    map_nodes,
    nodes_of,
    same_value,
)
from tekso.framework.params_types import REQUIRED, Mismatch, describe, type_name

__all__ = [
    "REQUIRED", "Configurable", "Field", "FrozenParamsError", "Params", "Required", "param", "wrap",
]  # fmt: skip

Required = params_types.Required
Origin = str | tuple[str, int]
P = TypeVar("P", bound="Params")

_MISSING: Any = object()
_OWN_FILES = {__file__}


def param(doc: str, *, default: Any = REQUIRED) -> Any:
    """Declares a field of a Params class: `name: type = param("What it is.", default=…)`.

    Args:
      doc: one line (or more) that documents the field.
      default: its value in a fresh instance; every instance gets a copy of its own.
    """
    return Field(doc, default)


class Field:
    """A field: name, type, doc and default. A data descriptor of its Params class."""

    __slots__ = ("_annotation", "_captured", "_checker", "declared_in", "default", "doc", "name")

    def __init__(self, doc: str, default: Any, *, name: str = "", annotation: Any = _MISSING):
        if not isinstance(doc, str) or not doc.strip():
            raise TypeError(f"a field needs a doc: param(\"What it is.\", default=…), got {doc!r}")
        self.doc = doc
        self.default = default
        self.name = name
        self.declared_in: type[Params] | None = None
        self._annotation = annotation
        self._captured: dict[str, Any] = {}
        self._checker: params_types.Checker | None = None

    @property
    def type(self) -> Any:
        """The annotation, resolved at first use."""
        if isinstance(self._annotation, str) or self._captured:
            self._annotation = _resolve(self)
            self._captured = {}
        return self._annotation

    def check(self, value: Any) -> Any:
        """`value`, converted where the rules allow it; raises Mismatch."""
        if value is REQUIRED:
            return value
        if self._checker is None:
            self._checker = params_types.checker(self.type)
        return self._checker(value)

    def __get__(self, node: Params | None, owner: Any = None) -> Any:
        if node is None:
            return self
        return node._values[self.name]

    def __set__(self, node: Params, value: Any) -> None:
        node._assign(self.name, value, origin=caller())

    def __delete__(self, node: Params) -> None:
        raise AttributeError(f"{node._where(self.name)}: a field cannot be deleted")

    def __repr__(self) -> str:
        return f"<Field {self.name}: {type_name(self._annotation)}>"


@dataclass_transform(kw_only_default=True, field_specifiers=(param,))
class Params(Node):
    """Base of all Params classes; see the module docstring.

    A Params sits in at most one place of one tree: assigning one that already has a place, or is
    frozen, stores a copy.
    """

    __slots__ = ("_extra", "_frozen", "_origins", "_parent", "_source", "_values")
    __hash__ = None  # type: ignore[assignment]  # equality is by value and values change

    owner: ClassVar[Any] = None
    _fields: ClassVar[dict[str, Field]] = {}
    _template: ClassVar[_Template | None] = None

    if TYPE_CHECKING:
        _values: dict[str, Any]
        _origins: dict[str, Origin]
        _extra: dict[str, Field]
        _frozen: bool
        _parent: Params | None
        _source: Params | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.owner = cls.__dict__.get("owner", cls.owner)
        cls._template = None
        _declare_fields(cls)

    def __init__(self, **kwargs: Any) -> None:
        template = type(self)._template or _make_template(type(self))
        values = dict(template.values)
        _init(self, values, {}, {}, None, None)
        for name in template.copied:
            values[name] = map_nodes(values[name], lambda node: node._copy(self, None))
        if kwargs:
            origin = caller()
            for name, value in kwargs.items():
                self._assign(name, value, origin=origin)

    # Single fields.

    if not TYPE_CHECKING:  # so that mypy and editors reject a typo

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            if name in self._extra:
                return self._values[name]
            raise self._unknown(name)

        def __setattr__(self, name: str, value: Any) -> None:
            self._assign(name, value, origin=caller())

        def __delattr__(self, name: str) -> None:
            raise AttributeError(f"{self._where(name)}: a field cannot be deleted")

    def fields(self) -> dict[str, Field]:
        """All fields by name: the declared ones, then those of `define`."""
        return {**self._fields, **self._extra}

    def define(self, name: str, value: Any, doc: str, *, type: Any = Any) -> None:
        """Adds a field to this instance alone.

        Raises:
          AttributeError: the name is taken, or no name a field can have.
          TypeError: the value is not of the type.
        """
        self._refuse_if_frozen(name)
        if name in self._fields or name in self._extra:
            raise AttributeError(f"{self._where(name)} is already a field of {self._title()}")
        _check_name(name, self._title())
        self._extra[name] = Field(doc, value, name=name, annotation=type)
        try:
            self._assign(name, value, origin=caller())
        except BaseException:
            del self._extra[name]
            raise

    # Many fields, by path.

    def get(self, path: str) -> Any:
        """The value at a dotted path: a leaf, a child or a container."""
        return self._place(path).value

    def set(self: P, mapping: Mapping[str, Any] | None = None, /, **kwargs: Any) -> P:
        """Sets values by dotted path, all or none of them; returns self.

        A path with wildcards ("*.dropout"; * matches dots too) sets everything that it hits. Items
        are applied in order, so a later path may lie in a child that an earlier one sets.

        Raises:
          AttributeError: a path is unknown, a wildcard hits nothing, or the Params are frozen.
          TypeError: a value is not of the type of its field.
        """
        origin = caller()
        items = [*(mapping or {}).items(), *kwargs.items()]
        self._transact(
            lambda place, value, log: place.node._assign(
                place.name, value, keys=place.keys, origin=origin, log=log
            ),
            items,
        )
        return self

    def set_text(self: P, path: str, text: str, *, origin: str = "--set") -> P:
        """Sets the value at a path (or all that a wildcard hits) from text, read by its type.

        Text for a child Params names its owner, "module:Class", or a class that is already loaded.

        Raises:
          AttributeError: the path is unknown, a wildcard hits nothing, or the Params are frozen.
          ValueError: the text does not read as a value of the type.
        """

        def assign(place: _Place, value: str, log: _Log) -> None:
            annotation = place.field.type
            container = place.node._values[place.name]
            for key in place.keys:
                annotation = params_types.item_annotation(annotation, key)
                container = container[key]
            try:
                parsed = params_types.parse(annotation, value)
            except ValueError as error:
                raise ValueError(f"{place.path}: {error}") from error
            place.node._assign(place.name, parsed, keys=place.keys, origin=origin, log=log)

        self._transact(assign, [(path, text)])
        return self

    def origin(self, path: str) -> str:
        """Where the value at a path was set: "default", "file.py:12", "--set" or "checkpoint"."""
        place = self._place(path)
        return _origin_text(place.node._origins.get(place.name, "default"))

    def __contains__(self, path: object) -> bool:
        try:
            self._place(str(path))
        except (AttributeError, paths.PathError):
            return False
        return True

    # Whole trees.

    def copy(self: P) -> P:
        """A copy that shares no node or container, unfrozen; values keep their origins."""
        return self._copy(None, self if self._parent is not None else self._source)

    def freeze(self: P) -> P:
        """Makes the whole tree unchangeable, containers too; returns self.

        Raises:
          TypeError: an item that was put into a container afterwards is not of its type.
        """
        if not self._frozen:
            self._recheck()
            self._freeze()
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether the tree can no longer be changed."""
        return self._frozen

    def visit(self, fn: Callable[[str, Any, Field], Any]) -> None:
        """Calls `fn(path, value, field)` for every leaf, in the order of declaration.

        A leaf is a value that is neither Params nor a container that holds some.
        """
        for path, value, field in self._walk(""):
            if not isinstance(value, Node) and not holds_nodes(value):
                fn(path, value, field)

    def diff(self, other: Params) -> str:
        """What changes from self to other, a line a difference; empty if nothing does."""
        from tekso.framework import params_text

        return params_text.diff(self, other)

    def to_text(self, *, origins: bool = False) -> str:
        """The tree as text, one line a leaf; `origins` adds where each value was set as comment.

        Raises:
          TypeError: a value has no text form.
        """
        from tekso.framework import params_text

        return params_text.to_text(self, origins=origins)

    @staticmethod
    def from_text(text: str, *, origin: str = "checkpoint") -> Any:
        """The tree that `to_text` wrote.

        Only modules that the text names as homes of owners are imported; nothing is evaluated.

        Raises:
          ValueError: a line cannot be read, or names what cannot be resolved.
        """
        from tekso.framework import params_text

        return params_text.from_text(text, origin=origin)

    def instantiate(self, **kwargs: Any) -> Any:
        """Builds the owner: `owner(params, **kwargs)` with these Params, frozen.

        Raises:
          ValueError: a field is REQUIRED and not set.
        """
        params = self if self._frozen else self.copy().freeze()
        for name, value in params._values.items():
            if value is REQUIRED:
                raise ValueError(
                    f"{params._where(name)} is REQUIRED and not set ({params._title()}: "
                    f"{params.fields()[name].doc})"
                )
        return params._build(kwargs)

    def _build(self, kwargs: dict[str, Any]) -> Any:
        if self.owner is None:
            raise TypeError(f"{self._title()} has no owner: nest it in a Configurable class")
        return self.owner(self, **kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Params):
            return NotImplemented
        if self is other:
            return True
        return type(self) is type(other) and same_value(self._values, other._values)

    def __repr__(self) -> str:
        changed = [
            f"{name}={value!r}"
            for name, value in self._values.items()
            if name in self._origins or name in self._extra or isinstance(value, Node)
        ]
        return f"{self._title()}({', '.join(changed)})"

    def __copy__(self: P) -> P:
        return self.copy()

    def __deepcopy__(self: P, memo: Any) -> P:
        return self.copy()

    def __getstate__(self) -> tuple[Any, ...]:
        return self._values, self._origins, self._extra, self._frozen, self._parent, None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        values, origins, extra, frozen, parent, source = state
        _init(self, values, origins, extra, parent, source)
        _SET["_frozen"](self, frozen)

    # Internals.

    def _copy(self: P, parent: Params | None, source: Params | None) -> P:
        new: P = _NEW(type(self))
        values = self._values.copy()
        _init(new, values, self._origins.copy(), self._extra.copy(), parent, source)
        for name, value in values.items():
            if type(value) not in ATOMS:
                values[name] = map_nodes(value, lambda node: node._copy(new, None))
        return new

    def _recheck(self) -> None:
        """Checks containers again: they can be changed in place as long as nothing is frozen."""
        for name, value in self._values.items():
            if type(value) in ATOMS:
                continue
            if isinstance(value, CONTAINERS):
                origin = self._origins.get(name)
                self._assign(name, value, origin=origin)
                value = self._values[name]
            for node in nodes_of(value):
                if not node._frozen:
                    node._recheck()

    def _freeze(self) -> None:
        values = self._values
        for name, value in values.items():
            if type(value) not in ATOMS:
                values[name] = map_nodes(value, _freeze_node, frozen=True)
        _SET["_frozen"](self, True)

    def _title(self) -> str:
        return type_name(type(self))

    def _path(self) -> str:
        """The path of this node from the root of its tree; a copy remembers where it came from."""
        parent = self._parent
        if parent is None:
            return self._source._path() if self._source is not None else ""
        for name, value in parent._values.items():
            for path, node in _nodes_with_paths(paths.join(parent._path(), name), value):
                if node is self:
                    return path
        return ""

    def _where(self, name: str) -> str:
        return paths.join(self._path(), name)

    def _refuse_if_frozen(self, name: str) -> None:
        if self._frozen:
            raise FrozenParamsError(
                f"cannot set {self._where(name)}: {self._title()} is frozen; "
                "copy() gives a changeable copy"
            )

    def _unknown(self, name: str) -> AttributeError:
        names = list(self.fields())
        deeper = [path for path, _, _ in self._walk("")]
        hint = paths.suggestion(name, self._path(), names, deeper)
        return AttributeError(f"{self._title()} has no field {self._where(name)}; {hint}")

    def _walk(self, prefix: str) -> Iterator[tuple[str, Any, Field]]:
        """(path, value, field) of everything below: children and containers before their items."""
        for name, field in self.fields().items():
            yield from _walk_value(paths.join(prefix, name), self._values[name], field)

    def _place(self, path: str) -> _Place:
        """What a path without wildcards means."""
        node: Params = self
        segments = paths.split(path)
        position = 0
        while True:
            name = str(segments[position])
            field = node._fields.get(name) or node._extra.get(name)
            if field is None:
                raise node._unknown(name)
            value, keys, where = node._values[name], [], node._where(name)
            position += 1
            while position < len(segments) and not isinstance(value, Node):
                if not isinstance(value, (list, tuple, dict)):
                    raise AttributeError(
                        f"there is no {where}.{segments[position]}: {where} is {describe(value)}, "
                        "which has no fields"
                    )
                try:
                    key = paths.find_key(value, segments[position])
                except KeyError as error:
                    hint = paths.suggestion(str(segments[position]), where, error.args[0], [])
                    raise AttributeError(
                        f"{where} has no item {segments[position]}; {hint}"
                    ) from None
                where = (
                    paths.join_key(where, key) if isinstance(value, dict) else f"{where}.{key}"
                )
                keys.append(key)
                value = value[key]
                position += 1
            if position == len(segments):
                return _Place(node, name, tuple(keys), value, field, where)
            node = value

    def _places(self, path: str) -> list[_Place]:
        """What a path with or without wildcards means; at least one place."""
        if not paths.is_glob(path):
            return [self._place(path)]
        try:
            return [self._place(path)]  # name["key"] looks like a wildcard
        except (AttributeError, paths.PathError):
            pass
        everything = [found for found, _, _ in self._walk("")]
        hits = paths.matching(path, everything)
        if not hits:
            close = paths.close_to_glob(path, everything)
            hint = f"did you mean {' or '.join(close)}?" if close else "visit() lists all paths"
            raise AttributeError(f"{path!r} hits no field of {self._title()}; {hint}")
        return [self._place(hit) for hit in hits]

    def _transact(
        self, assign: Callable[[_Place, Any, _Log], None], items: list[tuple[str, Any]]
    ) -> None:
        log: _Log = []
        try:
            for path, value in items:
                for place in self._places(path):
                    assign(place, value, log)
        except BaseException:
            for undo in reversed(log):
                undo()
            raise

    def _assign(
        self,
        name: str,
        value: Any,
        *,
        origin: Origin | None,
        keys: tuple[Any, ...] = (),
        log: _Log | None = None,
    ) -> None:
        """Checks and stores one value; `log` takes what undoes it."""
        field = self._fields.get(name) or self._extra.get(name)
        if field is None:
            raise self._unknown(name)
        if self._frozen:
            self._refuse_if_frozen(name)
        values, origins = self._values, self._origins
        old = values.get(name)
        stored = _with_item(old, keys, value) if keys else value
        try:
            stored = field.check(stored)
        except Mismatch as mismatch:
            raise TypeError(
                f"{self._where(name)}: wanted {type_name(field.type)}, given {describe(stored)}"
                + (f" ({mismatch})" if str(mismatch) else "")
            ) from None
        if log is not None:
            _log_value(log, self, name)
        if type(stored) not in ATOMS or type(old) not in ATOMS:
            stored = self._adopt(name, old, stored, log)
        values[name] = stored
        if origin is None:
            origins.pop(name, None)
        else:
            origins[name] = origin

    def _adopt(self, name: str, old: Any, value: Any, log: _Log | None) -> Any:
        """`value` with this node as the parent of the nodes in it, and `old` let go."""
        kept = {id(node) for node in nodes_of(old)}
        seen: set[int] = set()

        def take(node: Params) -> Params:
            above: Params | None = self
            while above is not None:
                if above is node:
                    raise ValueError(f"{self._where(name)}: Params cannot contain themselves")
                above = above._parent
            if id(node) in kept and node._parent is self and id(node) not in seen:
                seen.add(id(node))
                return node
            if node._parent is not None or node._frozen:
                return node._copy(self, None)
            if log is not None:
                log.append(lambda: _SET["_parent"](node, None))
            _SET["_parent"](node, self)
            return node

        result = map_nodes(value, take)
        for node in nodes_of(old):
            if id(node) not in seen and node._parent is self:
                if log is not None:
                    log.append(lambda node=node: _SET["_parent"](node, self))  # type: ignore[misc]
                _SET["_parent"](node, None)
        return result


_NEW = object.__new__
_SET = {name: getattr(Params, name).__set__ for name in Params.__slots__}


def _init(
    node: Params,
    values: dict[str, Any],
    origins: dict[str, Origin],
    extra: dict[str, Field],
    parent: Params | None,
    source: Params | None,
    set_values: Any = _SET["_values"],
    set_origins: Any = _SET["_origins"],
    set_extra: Any = _SET["_extra"],
    set_frozen: Any = _SET["_frozen"],
    set_parent: Any = _SET["_parent"],
    set_source: Any = _SET["_source"],
) -> None:
    """Fills the slots of a fresh node past `__setattr__`."""
    set_values(node, values)
    set_origins(node, origins)
    set_extra(node, extra)
    set_frozen(node, False)
    set_parent(node, parent)
    set_source(node, source)


def _freeze_node(node: Params) -> Params:
    if not node._frozen:
        node._freeze()
    return node


_Log = list[Callable[[], None]]


class _Place(typing.NamedTuple):
    """What a path means: a field of a node, or an item in a container that the field holds."""

    node: Params
    name: str
    keys: tuple[Any, ...]
    value: Any
    field: Field
    path: str


class _Template(typing.NamedTuple):
    """What a fresh instance starts with."""

    values: dict[str, Any]
    copied: tuple[str, ...]


def _log_value(log: _Log, node: Params, name: str) -> None:
    values, origins = node._values, node._origins
    value, origin = values.get(name, _MISSING), origins.get(name, _MISSING)

    def undo() -> None:
        for table, old in ((values, value), (origins, origin)):
            if old is _MISSING:
                table.pop(name, None)
            else:
                table[name] = old  # type: ignore[index]

    log.append(undo)


def _with_item(container: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """The container with one item, maybe deeper in it, replaced; the original is left alone."""
    if not keys:
        return value
    changed = _with_item(container[keys[0]], keys[1:], value)
    if isinstance(container, dict):
        return {**container, keys[0]: changed}
    items = list(container)
    items[keys[0]] = changed
    return tuple(items) if isinstance(container, tuple) else items


def _walk_value(path: str, value: Any, field: Field) -> Iterator[tuple[str, Any, Field]]:
    yield path, value, field
    if type(value) in ATOMS:
        return
    if isinstance(value, Params):
        yield from value._walk(path)
    elif isinstance(value, (list, tuple)) and holds_nodes(value):
        for index, item in enumerate(value):
            yield from _walk_value(paths.join_index(path, index), item, field)
    elif isinstance(value, dict) and holds_nodes(value):
        for key, item in value.items():
            yield from _walk_value(paths.join_key(path, key), item, field)


def _nodes_with_paths(path: str, value: Any) -> Iterator[tuple[str, Params]]:
    if isinstance(value, Params):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _nodes_with_paths(paths.join_index(path, index), item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _nodes_with_paths(paths.join_key(path, key), item)


# Declaration of fields.


def _check_name(name: str, title: str) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise AttributeError(f"{title}: {name!r} is no name a field can have")
    if hasattr(Params, name):
        raise AttributeError(f"{title}: {name!r} is a method of Params; a field needs another name")


def _declare_fields(cls: type[Params]) -> None:
    """Collects the fields of a class and checks how they are written."""
    annotations = inspect.get_annotations(cls)
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields.update(base.__dict__.get("_own_fields", {}))
    own: dict[str, Field] = {}
    for name, annotation in annotations.items():
        if name.startswith("_") or _is_class_var(annotation):
            continue
        field = cls.__dict__.get(name)
        if not isinstance(field, Field):
            raise TypeError(
                f"{type_name(cls)}.{name} has no doc: write "
                f"{name}: {annotation if isinstance(annotation, str) else type_name(annotation)}"
                ' = param("What it is.", default=…)'
            )
        _check_name(name, type_name(cls))
        field.name, field.declared_in, field._annotation = name, cls, annotation
        field._captured = _enclosing_names(annotation, cls)
        own[name] = field
    for name, value in cls.__dict__.items():
        if name in own:
            continue
        if isinstance(value, Field):
            if name not in fields:
                raise TypeError(f"{type_name(cls)}.{name} has no type: write {name}: TYPE = param(…)")
            inherited = fields[name]
            value.name, value.declared_in = name, inherited.declared_in
            value._annotation, value._captured = inherited._annotation, dict(inherited._captured)
            own[name] = value
        elif name in fields:
            raise TypeError(
                f"{type_name(cls)}.{name} hides a field: to change its default write "
                f"{name} = param({fields[name].doc!r}, default={value!r})"
            )
    for field in own.values():
        field.default = map_nodes(field.default, _as_default)
    cls._own_fields = own  # type: ignore[attr-defined]
    cls._fields = {**fields, **own}


def _as_default(node: Params) -> Params:
    """A copy of a child in a default; its values are defaults too."""
    copy = node.copy()
    _SET["_source"](copy, None)
    _forget_origins(copy)
    return copy


def _forget_origins(node: Params) -> None:
    node._origins.clear()
    for value in node._values.values():
        for child in nodes_of(value):
            _forget_origins(child)


def _make_template(cls: type[Params]) -> _Template:
    """Checks the defaults of a class, at its first use, when all annotations can be resolved."""
    values: dict[str, Any] = {}
    for name, field in cls._fields.items():
        try:
            values[name] = field.check(field.default)
        except Mismatch as mismatch:
            raise TypeError(
                f"default of {type_name(cls)}.{name}: wanted {type_name(field.type)}, "
                f"given {describe(field.default)}" + (f" ({mismatch})" if str(mismatch) else "")
            ) from None
    copied = tuple(name for name, value in values.items() if type(value) not in ATOMS)
    template = _Template(values, copied)
    cls._template = template
    return template


def _is_class_var(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)?ClassVar\b", annotation) is not None
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def _enclosing_names(annotation: Any, cls: type[Params]) -> dict[str, Any]:
    """What the names in an annotation mean in the functions and classes around the class.

    They are looked up now, because those scopes are gone when the annotation is resolved.
    """
    if not isinstance(annotation, str):
        return {}
    wanted = set(re.findall(r"[^\W\d]\w*", annotation))
    found: dict[str, Any] = {}
    frame = _frame_outside()
    while frame is not None and frame.f_code.co_name != "<module>" and wanted:
        if frame.f_globals.get("__name__") == cls.__module__:
            for name in wanted & frame.f_locals.keys():
                if not isinstance(frame.f_locals[name], Field):
                    found.setdefault(name, frame.f_locals[name])
        frame = frame.f_back
    return found


def _resolve(field: Field) -> Any:
    """The type that the text of an annotation means."""
    cls = field.declared_in
    title = f"{type_name(cls)}.{field.name}"
    names = dict(field._captured)
    module = sys.modules.get(cls.__module__) if cls is not None else None
    if cls is not None and cls.owner is not None:
        names.setdefault(cls.owner.__name__, cls.owner)
        names.setdefault("Params", cls)
    holder = types.SimpleNamespace(__annotations__={"it": field._annotation})
    try:
        return typing.get_type_hints(
            holder, globalns=vars(module) if module is not None else {}, localns=names
        )["it"]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise TypeError(
            f"the type of {title}, {field._annotation!r}, cannot be resolved: {error}. It has to "
            "be importable at run time: not under `if TYPE_CHECKING`"
        ) from error


# Origins.


def _frame_outside() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame


def caller() -> Origin:
    """File and line of the code that called into Params."""
    frame = _frame_outside()
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else "default"


def hide_from_origins(file: str) -> None:
    """Leaves a file of the framework out when origins are looked up: `hide_from_origins(__file__)`."""
    _OWN_FILES.add(file)


def _origin_text(origin: Origin) -> str:
    if isinstance(origin, str):
        return origin
    file, line = origin
    inside = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if inside.startswith('..') else inside}:{line}"


class Configurable:
    """A class that is built from its nested Params: `Linear.Params(input_dim=3).instantiate()`."""

    class Params(Params):
        """Params of a Configurable."""

    params: Any

    def __init__(self, params: Any) -> None:
        """Keeps the frozen Params as `self.params`."""
        self.params = params.copy().freeze() if not params.is_frozen else params

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = _most_derived(
            [base.Params for base in cls.__bases__ if issubclass(base, Configurable)]
        )
        own = cls.__dict__.get("Params")
        if own is None or own.__dict__.get("owner") is not None:
            bases = tuple(inherited) if own is None else (own,)
            namespace = {
                "__doc__": f"Params of {cls.__name__}.",
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Params",
            }
            own = type("Params", bases, namespace)
            cls.Params = own  # type: ignore[misc]
        for base in inherited:
            if not issubclass(own, base):
                raise TypeError(
                    f"{type_name(own)} has to derive from {type_name(base)}: "
                    f"class Params({type_name(base)})"
                )
        own.owner = cls


Configurable.Params.owner = Configurable


def _most_derived(classes: list[type[Params]]) -> list[type[Params]]:
    unique = list(dict.fromkeys(classes))
    return [
        one for one in unique if not any(o is not one and issubclass(o, one) for o in unique)
    ]


def wrap(target: Callable[..., Any]) -> type[Any]:
    """The Params class of a callable or class from outside: a field per argument of its signature.

    `instantiate()` calls it with the values by name; child Params are instantiated first. An
    argument without default is REQUIRED. The same target always gives the same class.
    """
    from tekso.framework import params_wrap

    return params_wrap.wrapped(target)
