"""Versions of Params classes, and the migrations that texts of earlier versions go through.

    def _to_milliseconds(fields):
        fields["timeout_ms"] = 1000 * fields.pop("timeout_s")
        return fields

    class Reader(Configurable):
        class Params(Configurable.Params):
            version = 2
            migrations: ClassVar[dict[int, Migration]] = {1: _to_milliseconds}

            timeout_ms: int = param("Time limit in milliseconds.", default=5000)

A class without `version` has version 1, and a text states all versions above 1, also those of base
classes: Params("my:Reader", {"my:Reader": 2}). `fields` are the lines of the text below the Params:
{path: value}, such as {"timeout_s": 5, "cache": Cache.Params(), "cache.size": 3}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tekso.framework.params import references
from tekso.framework.params.types import describe, type_name

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the fields of one version, and returns those of the next; it may change its argument."""

_VERSION, _MIGRATIONS = "version", "migrations"
DECLARED = (_VERSION, _MIGRATIONS)
"""Attributes of a Params class that are no fields."""


class NewerVersionError(ValueError):
    """A text of Params has a version of a class that is newer than the class."""


def version_of(cls: Any) -> int:
    """Returns the version that a Params class itself declares; 1 if it declares none."""
    version = vars(cls).get(_VERSION)
    return version if type(version) is int else 1


def versions_of(cls: Any) -> dict[str, int]:
    """Returns {reference of a class: its version}, for a class and its bases above version 1."""
    return {references.of_params(one): version_of(one) for one in _versioned(cls)}


def check_declared(cls: Any) -> None:
    """Checks the version and the migrations of a class.

    Raises:
      TypeError: the version is not a number from 1, or a migration is missing or has no use.
    """
    version, migrations = vars(cls).get(_VERSION), vars(cls).get(_MIGRATIONS, {})
    if type(version) is int and version < 1:
        raise TypeError(f"{type_name(cls)}.{_VERSION} is {version}, but versions count from 1")
    if not isinstance(migrations, Mapping):  # a field of this name
        return
    wanted = range(1, version_of(cls))
    if missing := [number for number in wanted if not callable(migrations.get(number))]:
        raise TypeError(
            f"{type_name(cls)} has version {version_of(cls)}, but no migration from version "
            f"{missing[0]}: add it to {_MIGRATIONS} = {{{missing[0]}: function}}"
        )
    if more := [number for number in migrations if number not in wanted]:
        raise TypeError(
            f"{type_name(cls)} has version {version_of(cls)}, but a migration from version "
            f"{more[0]!r}: set {_VERSION} = {len(migrations) + 1}"
        )


def check_stated(cls: Any, stated: Any) -> dict[str, int]:
    """Returns the versions that a text states for the Params of a class, by present references.

    Raises:
      NewerVersionError: a version is newer than the class.
      ValueError: they are not versions.
    """
    if type(stated) is not dict or not all(
        type(key) is str and type(number) is int and number > 0 for key, number in stated.items()
    ):
        raise ValueError(
            f'the versions of Params must be {{"module:Class": number}}, given {describe(stated)}'
        )
    found: dict[str, int] = {}
    name: str
    for name, number in stated.items():
        found[references.RENAMED.get(name, name)] = number
    for one in cls.__mro__:
        known = version_of(one)
        reference = references.of_params(one) if hasattr(one, "owner") else ""
        if found.get(reference, 1) > known:
            raise NewerVersionError(
                f"{reference} has version {found[reference]} in the text, but {known} in the code: "
                "a newer version of the package wrote the text; update the package"
            )
    return found


def is_outdated(cls: Any, stated: Mapping[str, int]) -> bool:
    """Whether the fields of a text have to be migrated; `stated` as `check_stated` returns it."""
    return any(
        version_of(one) > stated.get(references.of_params(one), 1) for one in _versioned(cls)
    )


def migrated(cls: Any, stated: Mapping[str, int], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a text in the present versions.

    The migrations of base classes come first. Those of child Params have not yet been applied.

    Args:
      cls: the Params class.
      stated: as `check_stated` returns it.
      fields: {path from the Params: value}.

    Raises:
      ValueError: a migration failed, or returned no fields.
    """
    for one in reversed(list(_versioned(cls))):
        for version in range(stated.get(references.of_params(one), 1), version_of(one)):
            where = f"the migration of {type_name(one)} from version {version}"
            try:
                fields = vars(one)[_MIGRATIONS][version](fields)
            except Exception as error:  # of a function of the user
                raise ValueError(f"{where} failed: {type(error).__name__}: {error}") from error
            if type(fields) is not dict or not all(type(path) is str for path in fields):
                raise ValueError(f"{where} must return a dict by paths, not {describe(fields)}")
    return fields


def _versioned(cls: Any) -> Iterator[Any]:
    """Yields the class and its bases that have a version above 1."""
    return (one for one in cls.__mro__ if version_of(one) > 1)
