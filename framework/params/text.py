"""The text of a Params tree: one line `path : literal` for every leaf and every child.

    . : Params("tekso.models.layers.linear:Linear")
    input_dim : 3
    init : Params("tekso.framework.initializers:Constant")
    init.value : 0.5
    layers : [Params("their.module:Layer"), Params("their.module:Layer")]
    layers.0.dim : 3

Empty lines and comments (#) are skipped. Fields that the text does not contain keep their defaults.
Params of a class with a version above 1 have the version in the text; see `versions.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tekso.framework.params import literals, paths, references, versions
from tekso.framework.params import tree as params_tree
from tekso.framework.params.containers import ATOMS, Node, holds_nodes, same_value
from tekso.framework.params.origins import Origin, hide_from_origins, origin_text

hide_from_origins(__file__)

_SEPARATOR = " : "


def to_text(params: Any, *, origins: bool = False) -> str:
    """Returns the text of a tree; with `origins`, comments say where values were set.

    Raises:
      TypeError: a value has no text form.
    """
    lines = [f".{_SEPARATOR}{literals.write(params)}"]
    for path, literal, origin in _entries(params, ""):
        comment = f"  # {origin_text(origin)}" if origins and origin != "default" else ""
        lines.append(f"{path}{_SEPARATOR}{literal}{comment}")
    return "\n".join(lines) + "\n"


def _entries(node: Any, prefix: str) -> Iterator[tuple[str, str, Origin]]:
    for name, value in node._values.items():
        path = paths.join(prefix, name)
        try:
            literal = literals.write(value)
        except TypeError as error:
            raise TypeError(f"{node._where(name)}: {error}") from None
        yield path, literal, node._origins.get(name, "default")
        if type(value) not in ATOMS:
            yield from _entries_below(path, value)


def _entries_below(path: str, value: Any) -> Iterator[tuple[str, str, Origin]]:
    if isinstance(value, Node):
        yield from _entries(value, path)
        return
    for where, item in params_tree.items_with_paths(path, value):
        yield from _entries_below(where, item)


def from_text(text: str, *, origin: Origin) -> Any:
    """Returns the tree that a text describes.

    Raises:
      ValueError: a line cannot be read; the message contains the line.
      NewerVersionError: the text has a version of Params that is newer than the class.
    """
    reader = _Reader(text, origin)
    reader.read_all()
    if reader.root is None:
        raise ValueError('the text is empty: it must begin with . : Params("module:Owner")')
    return reader.root


class _Entry(NamedTuple):
    """A value that is to be read.

    Attributes:
      number: of the line that it comes from, from 1.
      line: the line.
      path: in the text; "" is the root.
      value: its value; None: not parsed, because the field no longer exists.
    """

    number: int
    line: str
    path: str
    value: Any


class _Reader:
    """Builds a tree from the lines of a text.

    Attributes:
      root: the tree; None before the first line.
    """

    def __init__(self, text: str, origin: Origin) -> None:
        self.root: Any = None
        self._origin = origin
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        # What is to be read, the next one last: lines, and fields that a migration returned.
        self._queue: list[tuple[int, str] | _Entry] = [
            one for one in reversed(lines) if one[1] and not one[1].startswith("#")
        ]
        self._outdated: list[literals.Outdated] = []
        self._nodes: dict[str, Any] = {}  # by path in the text
        self._renamed: dict[str, str] = {}  # {path in the text: path in the tree}
        self._dropped: set[str] = set()  # paths of fields that no longer exist

    def read_all(self) -> None:
        """Reads all lines."""
        while self._queue:
            entry = self._parsed(self._queue.pop())
            with _errors_in(entry.number, entry.line):
                if self.root is None:
                    self.root = self._nodes[""] = entry.value
                elif not self._is_dropped(entry.path):
                    self._read_field(entry.path, entry.value)
            if not self._is_dropped(entry.path):
                for one in list(self._outdated):
                    where = params_tree.path_of(one.params, entry.path, entry.value)
                    if where is not None:
                        self._outdated.remove(one)
                        self._migrate(one, where, entry)

    def _parsed(self, item: tuple[int, str] | _Entry) -> _Entry:
        if isinstance(item, _Entry):
            return item
        number, line = item
        with _errors_in(number, line):
            path, literal = _split_line(line)
            if self._is_dropped(path):
                return _Entry(number, line, path, None)
            value = literals.parse(literal, outdated=self._outdated)
            if self.root is None:
                _check_first(path, literal, value)
                path = ""
            return _Entry(number, line, path, value)

    def _is_dropped(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{dropped}.") for dropped in self._dropped)

    def _migrate(self, one: literals.Outdated, path: str, entry: _Entry) -> None:
        """Replaces the fields of Params in the queue by those after the migration.

        Args:
          one: the Params.
          path: of the Params in the text.
          entry: the value that contains them.
        """
        start = f"{path}." if path else ""
        below: list[tuple[int, str] | _Entry] = []
        others: list[tuple[int, str] | _Entry] = []
        for item in self._queue:
            text = item.path if isinstance(item, _Entry) else item[1]
            (below if text.startswith(start) else others).append(item)
        entries = {found.path: found for found in map(self._parsed, reversed(below))}
        fields = {path.removeprefix(start): found.value for path, found in entries.items()}
        with _errors_in(entry.number, entry.line):
            fields = versions.migrated(type(one.params), one.stated, fields)
            names = sorted(
                fields, key=lambda name: len(paths.split(name))
            )  # children before their fields
        new = []
        for name in names:
            known = entries.get(start + name, entry)
            new.append(known._replace(path=start + name, value=fields[name]))
        self._queue = [*others, *reversed(new)]

    def _read_field(self, path: str, value: Any) -> None:
        prefix, _, name = path.rpartition(".")
        if prefix not in self._nodes:
            self._nodes[prefix] = self.root.get(self._present(prefix))
            if not isinstance(self._nodes[prefix], Node):
                raise ValueError(f"{prefix} is not Params")
        parent = self._nodes[prefix]
        field = parent._field(name) or parent._renamed_field(name)
        if field is None:
            if name not in parent.old_fields:
                raise parent._unknown(name)
            self._dropped.add(path)
            classes = parent.old_fields[name].classes
            if isinstance(value, str) and value in classes:
                self._replace(prefix, references.params(classes[value])())
            return
        value, is_renamed = field.renewed(value), field.name != name
        name = field.name
        # A child of the same class stays; the following lines set its fields.
        if name in parent._origins or not _is_same(parent._values[name], value):
            parent._assign(name, value, origin=self._origin)
        if is_renamed:
            self._renamed[path] = paths.join(self._present(prefix), name)

    def _present(self, path: str) -> str:
        """Returns the path in the tree of a path in the text, which may have former names."""
        for old, new in reversed(self._renamed.items()):
            if path == old or path.startswith((f"{old}.", f"{old}[")):
                return new + path.removeprefix(old)
        return path

    def _replace(self, path: str, new: Any) -> None:
        """Replaces a node by one of another class, keeping the values of common fields."""
        old = self._nodes[path]
        for name in old._values.keys() & new._values.keys():
            value, origin = old._values[name], old._origins.get(name, self._origin)
            if isinstance(value, Node) or not _is_same(new._values[name], value):
                new._assign(name, value, origin=origin)
        if old is self.root:
            self.root = new
        else:
            place = params_tree.place(self.root, old._path())
            place.node._assign(place.name, new, keys=place.keys, origin=self._origin)
        start = f"{path}." if path else ""
        self._nodes = {p: node for p, node in self._nodes.items() if not p.startswith(start)}
        self._nodes[path] = new


def _check_first(path: str, literal: str, value: Any) -> None:
    """Raises a ValueError if the first line does not describe the root."""
    if path != ".":
        raise ValueError('the first line must be . : Params("module:Owner")')
    if not isinstance(value, Node):
        raise ValueError(f"{literal} is not Params")


@contextlib.contextmanager
def _errors_in(number: int, line: str) -> Iterator[None]:
    """Adds the number and the beginning of a line to errors."""
    try:
        yield
    except versions.NewerVersionError as error:
        raise versions.NewerVersionError(_in_line(number, line, error)) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(_in_line(number, line, error)) from error


def _in_line(number: int, line: str, error: Exception) -> str:
    return f"line {number}, {line[:80]!r}: {error}"


def _split_line(line: str) -> tuple[str, str]:
    end = line.find(_SEPARATOR)
    while end >= 0:
        path = line[:end].strip()
        if path == ".":
            return path, line[end + len(_SEPARATOR) :]
        try:
            paths.split(path)
            return path, line[end + len(_SEPARATOR) :]
        except paths.PathError:  # the separator is part of a key
            end = line.find(_SEPARATOR, end + 1)
    raise ValueError("expected path : literal")


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, Node) or isinstance(new, Node):
        return type(old) is type(new)
    return same_value(old, new)


def diff(old: Any, new: Any) -> str:
    """Returns the differences between two trees, one per line: `path : old -> new`."""
    lines = list(_diff_value("", old, new)) if type(old) is not type(new) else _diff(old, new, "")
    return "\n".join(lines)


def _diff(old: Any, new: Any, prefix: str) -> Iterator[str]:
    for name in dict.fromkeys([*old._values, *new._values]):
        path = paths.join(prefix, name)
        if name not in new._values:
            yield f"{path}{_SEPARATOR}{_show(old._values[name])} -> (no field)"
        elif name not in old._values:
            yield f"{path}{_SEPARATOR}(no field) -> {_show(new._values[name])}"
        else:
            yield from _diff_value(
                path, old._values[name], new._values[name], new._origins.get(name)
            )


def _diff_value(path: str, old: Any, new: Any, origin: Origin | None = None) -> Iterator[str]:
    if isinstance(old, Node) and isinstance(new, Node):
        if type(old) is not type(new):
            yield f"{path or '.'}{_SEPARATOR}{_show(old)} -> {_show(new)}{_comment(origin)}"
        yield from _diff(old, new, path)
        return
    olds = dict(params_tree.items_with_paths(path, old)) if holds_nodes(old) else {}
    news = dict(params_tree.items_with_paths(path, new)) if holds_nodes(new) else {}
    if olds and list(olds) == list(news):
        for where, item in olds.items():
            yield from _diff_value(where, item, news[where], origin)
    elif not same_value(old, new):
        yield f"{path}{_SEPARATOR}{_show(old)} -> {_show(new)}{_comment(origin)}"


def _comment(origin: Origin | None) -> str:
    return f"  # {origin_text(origin)}" if origin is not None else ""


def _show(value: Any) -> str:
    try:
        return literals.write(value)
    except TypeError:
        return repr(value)
