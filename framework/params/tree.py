"""Navigation in a Params tree: finds the locations of paths, and walks over a subtree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tekso.framework.params import paths
from tekso.framework.params.containers import ATOMS, Node, holds_nodes
from tekso.framework.params.fields import Field
from tekso.framework.params.types import describe


class Location(NamedTuple):
    """The location of a path: a field of a node, or an item of the container in the field."""

    node: Any
    name: str
    keys: tuple[Any, ...]
    value: Any
    field: Field
    root: Any
    segments: Sequence[paths.Segment]

    @property
    def path(self) -> str:
        """The path from the root of the tree, for errors: to find it, the tree is searched."""
        return _path_to(self.root, self.segments)


Entry = tuple[str, Any, Field]


def walk(node: Any, prefix: str = "") -> list[Entry]:
    """Returns (path, value, field) of everything below a node, parents before their children."""
    found: list[Entry] = []
    _collect(node, prefix + "." if prefix else "", found)
    return found


def _collect(node: Any, start: str, found: list[Entry]) -> None:
    fields = node._fields
    for name, value in node._values.items():
        field = fields[name]
        found.append((start + name, value, field))
        if type(value) not in ATOMS:
            _collect_items(value, start + name, field, found)


def _collect_items(value: Any, path: str, field: Field, found: list[Entry]) -> None:
    if isinstance(value, Node):
        _collect(value, path + ".", found)
    elif holds_nodes(value):
        for where, item in items_with_paths(path, value):
            found.append((where, item, field))
            _collect_items(item, where, field, found)


def items_with_paths(path: str, container: Any) -> Iterator[tuple[str, Any]]:
    """Yields the items of a container with their paths; nothing for other values."""
    if isinstance(container, (list, tuple)):
        for index, item in enumerate(container):
            yield f"{path}.{index}", item
    elif isinstance(container, dict):
        for key, item in container.items():
            yield paths.join_key(path, key), item


def path_of(node: Any, prefix: str, value: Any) -> str | None:
    """Returns the path of `node` in the value at `prefix`, without searching in other nodes."""
    if value is node:
        return prefix
    if not isinstance(value, Node):
        for path, item in items_with_paths(prefix, value):
            found = path_of(node, path, item)
            if found is not None:
                return found
    return None


def place(root: Any, path: str) -> Location:
    """Returns the location of a path without wildcards.

    Raises:
      AttributeError: there is no such field or item; the message suggests similar names.
      PathError: the text is not a path.
    """
    node = root
    field = node._field(path)
    if field is not None:  # most paths are the name of a field
        return Location(node, path, (), node._values[path], field, root, (path,))
    segments = paths.split(path)
    position = 0
    while True:
        name = str(segments[position])
        field = node._field(name)
        if field is None:
            raise node._unknown(name)
        value = node._values[name]
        keys = []
        position += 1
        while position < len(segments) and not isinstance(value, Node):
            key = _key(value, root, segments[: position + 1])
            value = value[key]
            keys.append(key)
            position += 1
        if position == len(segments):
            return Location(node, name, tuple(keys), value, field, root, segments)
        node = value


def _path_to(root: Any, segments: Sequence[paths.Segment]) -> str:
    """Returns the path, from the root of the tree, of a location below `root` that exists."""
    where: str = root._path()
    value = root
    for segment in segments:
        if isinstance(value, Node):
            name = str(segment)
            where, value = paths.join(where, name), value._values[name]  # type: ignore[attr-defined]
        else:
            key = paths.find_key(value, segment)
            where = paths.join_key(where, key) if isinstance(value, dict) else f"{where}.{key}"
            value = value[key]
    return where


def _key(container: Any, root: Any, segments: Sequence[paths.Segment]) -> Any:
    """Returns the key of the item of a container that the last of the segments below `root` names.

    Raises:
      AttributeError: the value is no container, or has no such item.
    """
    *above, segment = segments
    if not isinstance(container, (list, tuple, dict)):
        where = _path_to(root, above)
        raise AttributeError(
            f"there is no {where}.{segment}: {where} is {describe(container)}, which has no fields"
        )
    try:
        return paths.find_key(container, segment)
    except KeyError as error:
        where = _path_to(root, above)
        hint = paths.suggestion(str(segment), where, error.args[0], list)
        raise AttributeError(f"{where} has no item {segment}; {hint}") from None


def places(root: Any, path: str) -> list[Location]:
    """Returns the locations that a path, with or without wildcards, matches: at least one.

    Raises:
      AttributeError: there is no such field, or the wildcard matches nothing.
    """
    if not paths.is_glob(path):
        return [place(root, path)]
    try:
        return [place(root, path)]  # name["key"] looks like a wildcard, but is not one
    except (AttributeError, paths.PathError):
        pass
    everything = [found for found, _, _ in walk(root)]
    hits = paths.matching(path, everything)
    if not hits:
        close = paths.close_to_glob(path, everything)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise AttributeError(f"{path!r} matches no field of {root._title()}{hint}")
    return [place(root, hit) for hit in hits]


def with_item(container: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """Returns a container with one item, at any depth, replaced; the original is unchanged."""
    if not keys:
        return value
    changed = with_item(container[keys[0]], keys[1:], value)
    if isinstance(container, dict):
        return {**container, keys[0]: changed}
    items = list(container)
    items[keys[0]] = changed
    return tuple(items) if isinstance(container, tuple) else items
