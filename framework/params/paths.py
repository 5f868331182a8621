"""Dotted paths into a Params tree: grammar, wildcards, and suggestions for typos.

task.model.dropout      a field of a child
layers.0.dim            an item of a list
eval_inputs.dev.files   an item of a dict; a key that is not a plain name: eval_inputs["a.b"].files
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tekso.framework.params import literals
from tekso.framework.spelling import close_matches

_PLAIN = re.compile(r"[^\W\d][\w-]*\Z")
_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_SEGMENT = re.compile(rf"\.?(?P<name>[^.\[\]]+)|\[(?P<key>(?:{_STRING}|[^\]\"'])+)\]")


class PathError(ValueError):
    """A text is not a path."""


class UnknownNameError(AttributeError):
    """A tree has no field of a name.

    Searching for similar names takes milliseconds, so the message is made when it is shown: `in`
    and `hasattr` raise this error, too, and show none.

    Args:
      message: returns the message.
    """

    def __init__(self, message: Callable[[], str]) -> None:
        """Creates the error without its message."""
        super().__init__()
        self._message = message

    def __str__(self) -> str:
        """Returns the message."""
        return self._message()

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        """Pickles the error as an AttributeError with its message."""
        return AttributeError, (str(self),)


class Key:
    """A path segment in brackets: exactly this key of a dict or index of a list."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        """Creates the segment [value]."""
        self.value = value

    def __repr__(self) -> str:
        """Returns the segment as written in a path."""
        return f"[{self.value!r}]"


Segment = str | Key


def split(path: str) -> list[Segment]:
    """Returns the segments of a path.

    Raises:
      PathError: the text is not a path.
    """
    segments: list[Segment] = []
    end = 0
    while end < len(path):
        match = _SEGMENT.match(path, end)
        if match is None or (end == 0 and path[0] in ".["):
            raise PathError(f"{path!r} is not a path: expected name.name or name[key].name")
        if match["name"] is not None:
            if end and path[end] != ".":
                raise PathError(
                    f"{path!r} is not a path: a dot is missing before {match['name']!r}"
                )
            segments.append(match["name"])
        else:
            try:
                segments.append(Key(literals.parse(match["key"])))
            except ValueError:
                raise PathError(
                    f"{path!r} is not a path: {match['key']} is not a literal"
                ) from None
        end = match.end()
    if not segments:
        raise PathError("the path is empty")
    return segments


def join(prefix: str, name: str) -> str:
    """Returns the path of the field `name` of the node at `prefix` (empty for the root)."""
    return f"{prefix}.{name}" if prefix else name


def join_key(prefix: str, key: Any) -> str:
    """Returns the path of the item `key` of the container at `prefix`."""
    if type(key) is str and _PLAIN.match(key):
        return f"{prefix}.{key}"
    try:
        return f"{prefix}[{literals.write(key)}]"
    except TypeError:
        return f"{prefix}[{key!r}]"


def find_key(container: Any, segment: Segment) -> Any:
    """Returns the key or index of a container that a segment selects.

    Raises:
      KeyError: there is no such item; its argument is the list of existing keys, as text.
    """
    if isinstance(container, dict):
        if isinstance(segment, Key):
            if segment.value in container:
                return segment.value
        elif segment in container:
            return segment
        elif _is_int(segment) and int(segment) in container:
            return int(segment)
        raise KeyError([str(key) for key in container])
    index = segment.value if isinstance(segment, Key) else segment
    if (isinstance(index, int) or _is_int(index)) and (
        -len(container) <= int(index) < len(container)
    ):
        return int(index)
    raise KeyError([str(index) for index in range(len(container))])


def _is_int(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch(r"-?\d+", text) is not None


def is_glob(path: str) -> bool:
    """Returns whether a path has wildcards: * (any text, including dots), ? and [...]."""
    return any(char in path for char in "*?[")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Returns the full paths that a wildcard matches, without paths below another match."""
    wanted = re.compile(fnmatch.translate(pattern))
    hits: list[str] = []
    for path in paths:  # a node comes before the paths below it
        if wanted.match(path) and not (hits and path.startswith((hits[-1] + ".", hits[-1] + "["))):
            hits.append(path)
    return hits


def close_to_glob(pattern: str, paths: Sequence[str], *, count: int = 3) -> list[str]:
    """Returns paths that are similar to a wildcard that matches nothing."""

    def plain(path: str) -> str:
        return re.sub(r"\[.*?\]|[*?]", "", path)

    last = plain(pattern.rpartition(".")[2])
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    found = []
    for name in _similar(last, list(names), count):
        found += [path for path in paths if path.rpartition(".")[2] == name]
    if not found:
        found = close_matches(plain(pattern).strip("."), paths, count=count)
    return found[:count]


def _similar(word: str, names: Sequence[str], count: int) -> list[str]:
    """Returns names that are similar to a word, or that begin with a similar one."""

    def ratio(name: str) -> float:
        same = difflib.SequenceMatcher(None, word, name).ratio()
        beginning = difflib.SequenceMatcher(None, word, name[: len(word)]).ratio()
        return max(same, 0.9 * beginning if len(word) > 3 else 0)

    close = sorted(((ratio(name), name) for name in names), key=lambda one: -one[0])
    return [name for value, name in close[:count] if value >= 0.6]


def suggestion(
    name: str, prefix: str, names: Sequence[str], deeper: Callable[[], Sequence[str]]
) -> str:
    """Returns a hint for an unknown `name` at the level `prefix`, which has the members `names`.

    `deeper` returns the paths below the level, relative to it. If no name at the level is similar,
    the hint suggests paths that end in `name`, and the wildcard for all of them if there are
    several.
    """
    close = [join(prefix, match) for match in close_matches(name, names)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    below = deeper()
    hits = sorted(  # the uppermost first
        (path for path in below if path.endswith("." + name)), key=lambda path: path.count(".")
    )
    if len(hits) > 1:
        shown = " or ".join(join(prefix, path) for path in hits[:3])
        return f"did you mean {shown}, or {join(prefix, f'*.{name}')} for all {len(hits)}?"
    close = hits or close_to_glob(f"*.{name}", below)
    if close:
        return f"did you mean {' or '.join(join(prefix, path) for path in close)}?"
    if not names:
        return "it has no fields"
    shown_names = list(names)[:20]
    more = f", … ({len(names)} in all)" if len(names) > len(shown_names) else ""
    return f"it has: {', '.join(shown_names)}{more}"
