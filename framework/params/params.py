"""Params: typed, nested, documented configuration.

A `Params` class is nested in the class that it configures, its owner:

    class Linear(Layer):
        class Params(Layer.Params):
            \"\"\"Params of Linear.\"\"\"

            input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
            use_bias: bool = param("Whether to add a bias.", default=True)

    linear = Linear.Params(input_dim=3).set(use_bias=False).instantiate()

Every field has a type that is checked, a line of documentation, and a default or REQUIRED. Every
value has an origin: where it was set. Dotted paths set values in a tree, all of them or none. A
tree can be frozen in depth, compared, and written as text that is read back without loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from tekso.framework.params import arguments as params_arguments
from tekso.framework.params import assignment as params_assignment
from tekso.framework.params import paths, versions
from tekso.framework.params import text as params_text
from tekso.framework.params import tree as params_tree
from tekso.framework.params.containers import (
    ATOMS,
    FrozenParamsError,
    Node,
    holds_nodes,
    is_changeable,
    map_nodes,
    nodes_of,
    same_value,
)
from tekso.framework.params.fields import (
    Field,
    OldField,
    Template,
    declare_fields,
    make_template,
    param,
)
from tekso.framework.params.origins import Origin, caller, hide_from_origins, origin_text
from tekso.framework.params.types import (
    REQUIRED,
    Required,
    item_annotation,
    type_name,
)
from tekso.framework.source_lines import place_of

__all__ = ["REQUIRED", "Field", "FrozenParamsError", "OldField", "Params", "Required", "param"]

P = TypeVar("P", bound="Params")

hide_from_origins(__file__)


@dataclass_transform(kw_only_default=True, field_specifiers=(param,))
class Params(Node):
    """Base of all Params classes; see the module docstring.

    Params have at most one place, in one tree. Assigning Params that already have a place, or are
    frozen, stores a copy.
    """

    __slots__ = ("_frozen", "_origins", "_parent", "_source", "_values")
    __hash__ = None  # type: ignore[assignment]  # equality is by value and values change

    owner: ClassVar[Any] = None
    old_fields: ClassVar[Mapping[str, OldField]] = {}
    """{name of a former field: what replaces it}."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """{name that other frameworks have for a setting: what to write instead}."""
    _fields: ClassVar[dict[str, Field]] = {}
    _own_fields: ClassVar[dict[str, Field]] = {}
    _template: ClassVar[Template | None] = None

    if TYPE_CHECKING:
        _values: dict[str, Any]
        _origins: dict[str, Origin]
        _frozen: bool
        _parent: Params | None
        _source: Params | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collects the fields of the class body."""
        super().__init_subclass__(**kwargs)
        cls._template = None
        declare_fields(cls, Params)
        versions.check_declared(cls)

    def __init__(self, *values_without_names: Any, **kwargs: Any) -> None:
        """Creates Params with the default values, except those in the keyword arguments.

        Raises:
          TypeError: a value is given without the name of its field.
        """
        cls = type(self)
        if values_without_names:
            first = next(iter({**cls._own_fields, **cls._fields}), "field")
            raise TypeError(
                f"{type_name(cls)} takes the names of fields, as in {type_name(cls)}({first}="
                f"{values_without_names[0]!r:.40})"
            )
        template = cls._template
        if template is None:
            template = cls._template = make_template(cls)
        values = dict(template.values)
        _init(self, values, {}, None, None)
        for name in template.copied:
            values[name] = map_nodes(values[name], lambda node: node._copy(self, None))
        if kwargs:
            origin = caller()
            for name, value in kwargs.items():
                self._assign(name, value, origin=origin)

    # Single fields.

    if not TYPE_CHECKING:  # so that mypy and editors reject a typo

        def __getattr__(self, name: str) -> Any:
            """Raises an error for a name that is not a field; it suggests similar names."""
            raise AttributeError(name) if name.startswith("_") else self._unreadable(name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Sets a field; any other name is an error."""
            self._assign(name, value, origin=caller())

        def __delattr__(self, name: str) -> None:
            """Raises an error: a field cannot be deleted."""
            raise AttributeError(f"{self._where(name)}: a field cannot be deleted")

    def fields(self) -> dict[str, Field]:
        """Returns all fields by name, those of the base classes first."""
        return dict(self._fields)

    # Many fields, by path.

    def get(self, path: str) -> Any:
        """Returns the value at a dotted path: a leaf, a child or a container."""
        if path in self._values:
            return self._values[path]
        return params_tree.place(self, path).value

    def set(self: P, mapping: Mapping[str, Any] | None = None, /, **kwargs: Any) -> P:
        """Sets values by dotted path, all of them or none; returns self.

        A path with wildcards ("*.dropout"; * also matches dots) sets every value that it matches.
        Items are applied in order, so a later path may be inside a child that an earlier one sets.

        Raises:
          AttributeError: a path is unknown, a wildcard matches nothing, or the Params are frozen.
          TypeError: a value does not have the type of its field.
        """
        origin = caller()

        def assign(place: params_tree.Location, value: Any, log: params_assignment.Log) -> None:
            place.node._assign(place.name, value, keys=place.keys, origin=origin, log=log)

        params_assignment.transact(self, [*(mapping or {}).items(), *kwargs.items()], assign)
        return self

    def set_text(self: P, path: str, text: str, *, origin: str = "--set") -> P:
        """Sets the value at a path, or at all matches of a wildcard, from text.

        The text is parsed by the type of the field. For a child Params, it names the owner:
        "module:Class", or only "Class" if its module is imported or belongs to Tekso.

        Raises:
          AttributeError: the path is unknown, a wildcard matches nothing, or the Params are frozen.
          ValueError: the text does not describe a value of the type.
        """

        def assign(place: params_tree.Location, value: str, log: params_assignment.Log) -> None:
            annotation = place.field.type
            container = place.node._values[place.name]
            for key in place.keys:
                annotation = item_annotation(annotation, key)
                container = container[key]
            try:
                parsed = params_arguments.parse(annotation, value)
            except ValueError as error:
                raise ValueError(f"{place.path}: {error}") from error
            place.node._assign(place.name, parsed, keys=place.keys, origin=origin, log=log)

        params_assignment.transact(self, [(path, text)], assign)
        return self

    def origin(self, path: str) -> str:
        """Returns where a value was set: "default", "file.py:12", "--set" or "checkpoint"."""
        place = params_tree.place(self, path)
        return origin_text(place.node._origins.get(place.name, "default"))

    def path_of(self, name: str) -> str:
        """Returns the path of a field from the root of the tree, as in `--set`; for errors."""
        return self._where(name)

    def __contains__(self, path: object) -> bool:
        """Returns whether the tree has a field or item at a path."""
        if path in self._values:
            return True
        try:
            params_tree.place(self, str(path))
        except (AttributeError, paths.PathError):
            return False
        return True

    # Whole trees.

    def copy(self: P) -> P:
        """Returns an unfrozen copy that shares no node or container; values keep their origins."""
        return self._copy(None, self if self._parent is not None else self._source)

    def freeze(self: P) -> P:
        """Freezes the whole tree, including its containers; returns self.

        Raises:
          TypeError: a container was changed in place, and an item does not have the right type.
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

        A leaf is a value that is neither Params nor a container of Params.
        """
        for path, value, field in params_tree.walk(self):
            if not isinstance(value, Node) and not holds_nodes(value):
                fn(path, value, field)

    def diff(self, other: Params) -> str:
        """Returns the differences from self to other, one per line; "" if there are none."""
        return params_text.diff(self, other)

    def to_text(self, *, origins: bool = False) -> str:
        """Returns the tree as text, one line per leaf; `origins` adds origins as comments.

        Raises:
          TypeError: a value has no text form.
        """
        return params_text.to_text(self, origins=origins)

    @classmethod
    def from_text(cls: type[P], text: str, *, origin: str = "checkpoint") -> P:
        """Returns the tree that `to_text` wrote; values that are not default get the origin.

        Nothing is evaluated. Only the modules of owners that the text names are imported.

        Raises:
          ValueError: a line cannot be read, or a name in it cannot be resolved.
          NewerVersionError: the text has a version of a class that is newer than the class.
          TypeError: the text does not describe Params of this class.
        """
        params = params_text.from_text(text, origin=origin)
        if not isinstance(params, cls):
            raise TypeError(
                f"the text must describe {type_name(cls)}, given {type_name(type(params))}"
            )
        return params

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
                    f"{params._fields[name].doc})"
                )
        return params._build(kwargs)

    def _build(self, kwargs: dict[str, Any]) -> Any:
        if self.owner is None:
            raise TypeError(f"{self._title()} has no owner: nest it in a Configurable class")
        owner = type(self).owner
        try:
            built = owner(self, **kwargs)
        except TypeError as error:
            if wrong := _wrong_init(owner, self, kwargs):
                raise TypeError(wrong) from error
            raise
        if not hasattr(built, "params"):
            name = type(built).__name__
            raise TypeError(f"{name}.__init__ must begin with super().__init__(params)")
        return built

    def __eq__(self, other: object) -> bool:
        """Returns whether the class and all values are equal, in depth; ignores origins."""
        if not isinstance(other, Params):
            return NotImplemented
        if self is other:
            return True
        return type(self) is type(other) and same_value(self._values, other._values)

    def __repr__(self) -> str:
        """Returns the class and the values that are not default."""
        changed = [
            f"{name}={value!r}"
            for name, value in self._values.items()
            if name in self._origins or isinstance(value, Node)
        ]
        return f"{self._title()}({', '.join(changed)})"

    def __copy__(self: P) -> P:
        """Returns `copy()`."""
        return self.copy()

    def __deepcopy__(self: P, memo: Any) -> P:
        """Returns `copy()`."""
        return self.copy()

    def __getstate__(self) -> tuple[Any, ...]:
        """Returns the state that pickle stores."""
        return self._values, self._origins, self._frozen, self._parent, None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restores the state that pickle stored."""
        values, origins, frozen, parent, source = state
        _init(self, values, origins, parent, source)
        _SET["_frozen"](self, frozen)

    # Internals.

    def _copy(self: P, parent: Params | None, source: Params | None) -> P:
        new: P = _NEW(type(self))
        values = self._values.copy()
        _init(new, values, self._origins.copy(), parent, source)
        for name, value in values.items():
            if type(value) in ATOMS:
                continue
            if isinstance(value, Params):
                values[name] = value._copy(new, None)
            else:
                values[name] = map_nodes(value, lambda node: node._copy(new, None))
        return new

    def _recheck(self) -> None:
        """Checks containers again, because they can be changed in place until they are frozen."""
        if self._frozen:
            return
        for name, value in self._values.items():
            if type(value) in ATOMS:
                continue
            if isinstance(value, Params):
                value._recheck()
            elif is_changeable(value):
                self._assign(name, value, origin=self._origins.get(name))
                for node in nodes_of(self._values[name]):
                    node._recheck()

    def _freeze(self) -> None:
        if self._frozen:
            return
        values = self._values
        for name, value in values.items():
            if type(value) in ATOMS:
                continue
            if isinstance(value, Params):
                value._freeze()
            else:
                values[name] = map_nodes(value, _freeze_node, frozen=True)
        _SET["_frozen"](self, True)

    def _field(self, name: str) -> Field | None:
        return self._fields.get(name)

    def _renamed_field(self, name: str) -> Field | None:
        """Returns the field with this former name; None if there is none."""
        return next((f for f in self._fields.values() if name in f.old_names), None)

    def _title(self) -> str:
        return type_name(type(self))

    def _path(self) -> str:
        """Returns the path of this node in its tree; for a copy, the path of the original."""
        parent = self._parent
        if parent is None:
            return self._source._path() if self._source is not None else ""
        prefix = parent._path()
        for name, value in parent._values.items():
            if type(value) not in ATOMS:
                found = params_tree.path_of(self, paths.join(prefix, name), value)
                if found is not None:
                    return found
        return ""

    def _where(self, name: str) -> str:
        return paths.join(self._path(), name)

    def _without(self, name: str) -> str:
        """Returns the beginning of a message about an unknown name, with the path of this node."""
        path = self._path()
        what = f"{path} ({self._title()})" if path else self._title()
        return f"{what} has no field {name}"

    def _unreadable(self, name: str) -> AttributeError:
        if callable(getattr(self.owner, name, None)):
            return AttributeError(
                f"{self._without(name)}: it is a method of "
                f"{self.owner.__name__}, which Params only describe; declare it in __init__ of a "
                "layer by self.child(name, params), or build it by params.instantiate()"
            )
        return self._unknown(name)

    def _unknown(self, name: str) -> AttributeError:
        renamed = self._renamed_field(name)
        if renamed is not None:
            return AttributeError(
                f"{self._without(name)}: it was renamed to {self._where(renamed.name)}"
            )
        if name in self.old_fields:
            instead = self.old_fields[name].instead
            return AttributeError(f"{self._without(name)}: {instead}")
        if name in self.other_names:
            instead = self.other_names[name]
            return AttributeError(f"{self._without(name)}: {instead}")

        def message() -> str:
            hint = paths.suggestion(
                name,
                self._path(),
                list(self._fields),
                lambda: [path for path, _, _ in params_tree.walk(self)],
            )
            return f"{self._without(name)}; {hint}"

        return paths.UnknownNameError(message)

    def _assign(
        self, name: str, value: Any, *, origin: Origin | None, keys: tuple[Any, ...] = (),
        log: params_assignment.Log | None = None,
    ) -> None:  # fmt: skip
        params_assignment.assign(self, name, value, origin=origin, keys=keys, log=log)

    def _set_parent(self, parent: Params | None) -> None:
        _SET["_parent"](self, parent)


_NEW = object.__new__
_SET = {name: getattr(Params, name).__set__ for name in Params.__slots__}


def _init(
    node: Params,
    values: dict[str, Any],
    origins: dict[str, Origin],
    parent: Params | None,
    source: Params | None,
    set_values: Any = _SET["_values"],
    set_origins: Any = _SET["_origins"],
    set_frozen: Any = _SET["_frozen"],
    set_parent: Any = _SET["_parent"],
    set_source: Any = _SET["_source"],
) -> None:
    """Fills the slots of a new node without `__setattr__`."""
    set_values(node, values)
    set_origins(node, origins)
    set_frozen(node, False)
    set_parent(node, parent)
    set_source(node, source)


def _freeze_node(node: Params) -> Params:
    node._freeze()
    return node


def _wrong_init(owner: Any, params: Params, kwargs: dict[str, Any]) -> str:
    """Returns why the `__init__` of a class cannot be called with its Params, or ""."""
    try:
        signature = inspect.signature(owner.__init__)
        signature.bind(None, params, **kwargs)
    except ValueError:  # it has no signature
        return ""
    except TypeError:
        want = "".join(f", {name}" for name in ("params", *kwargs))
        name, place = owner.__name__, place_of(owner.__init__)
        return (
            f"{name}.__init__{signature}{place} is called with Params: write __init__(self{want}), "
            "begin it with super().__init__(params), and declare other arguments as fields of "
            f"{name}.Params"
        )
    return ""
