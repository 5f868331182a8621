"""Texts of Params of earlier versions are migrated; those of newer versions are refused."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tekso.framework.params import (
    Configurable,
    Migration,
    NewerVersionError,
    Params,
    param,
    rename_class,
)


def _to_milliseconds(fields: dict[str, Any]) -> dict[str, Any]:
    fields["timeout_ms"] = 1000 * fields.pop("timeout_s")
    return fields


def _split_limit(fields: dict[str, Any]) -> dict[str, Any]:
    limit = fields.pop("limit", 8)
    return {**fields, "limits": [Cache.Params(size=limit), Cache.Params(size=2 * limit)]}


def _double(fields: dict[str, Any]) -> dict[str, Any]:
    return {"size": 2 * fields["size"]}


class Plain(Configurable):
    class Params(Configurable.Params):
        size: int = param("A size.", default=3)


class Cache(Configurable):
    class Params(Configurable.Params):
        version = 2
        migrations: ClassVar[dict[int, Migration]] = {1: _double}

        size: int = param("A size in half units; in version 1, in units.", default=6)


class Reader(Configurable):
    class Params(Configurable.Params):
        version = 3
        migrations: ClassVar[dict[int, Migration]] = {1: _to_milliseconds, 2: _split_limit}

        timeout_ms: int = param("Milliseconds; in version 1 seconds, timeout_s.", default=5000)
        limits: list[Cache.Params] = param("Since version 3; before, one limit.", default=[])
        cache: Cache.Params = param("A child.", default=Cache.Params())


class FileReader(Reader):
    class Params(Reader.Params):
        version = 2
        migrations: ClassVar[dict[int, Migration]] = {
            1: lambda fields: {**fields, "folder": f"/{fields['folder']}"}
        }

        folder: str = param("A folder; in version 1 below /.", default="/data")


class Holder(Configurable):
    class Params(Configurable.Params):
        readers: dict[str, Reader.Params] = param("Children.", default={})
        reader: Reader.Params | None = param("A child.", default=None, old_names=["old"])


def ref(cls: type, **versions: int) -> str:
    """The literal of Params of a class, with versions of classes of this module."""
    stated = {f"{__name__}:{name}": version for name, version in versions.items()}
    return f'Params("{__name__}:{cls.__name__}"{f", {stated!r}" if stated else ""})'


def read(*lines: str) -> Any:
    return Params.from_text("\n".join(lines))


def test_the_text_states_versions_above_one_also_of_bases_and_is_read_back() -> None:
    tree = Holder.Params(readers={"a.b": FileReader.Params(folder="/x")})
    text = tree.to_text()
    assert text.startswith(f'. : Params("{__name__}:Holder")\n')
    stated = f'{{"{__name__}:FileReader": 2, "{__name__}:Reader": 3}}'
    assert f'{{"a.b": Params("{__name__}:FileReader", {stated})}}' in text
    assert Params.from_text(text) == tree
    assert Params.from_text(text).to_text() == text


@pytest.mark.parametrize(
    ("version", "lines", "sizes"),
    [
        ({}, ["timeout_s : 7", "limit : 5"], [5, 10]),
        ({"Reader": 1}, ["timeout_s : 7"], [8, 16]),
        ({"Reader": 2}, ["timeout_ms : 7000", "limit : 5"], [5, 10]),
        ({"Reader": 3}, ["timeout_ms : 7000"], []),
    ],
)
def test_migrations_are_a_chain_from_the_version_of_the_text(
    version: dict[str, int], lines: list[str], sizes: list[int]
) -> None:
    found = read(f". : {ref(Reader, **version)}", *lines)
    assert found.timeout_ms == 7000
    assert [limit.size for limit in found.limits] == sizes  # new Params are not migrated again
    assert found.origin("timeout_ms") == "checkpoint"


def test_a_child_is_migrated_after_its_parent_wherever_it_is() -> None:
    cache = [f"cache : {ref(Cache)}", "cache.size : 4"]
    new = ref(Cache, Cache=2)
    found = read(
        f". : {ref(Holder)}",
        f'readers : {{"a.b": {ref(Reader)}, "c": {ref(Reader, Reader=3)}}}',
        'readers["a.b"].timeout_s : 1',
        *(f'readers["a.b"].{line}' for line in cache),
        "readers.c.timeout_ms : 2",
        f"readers.c.cache : {new}",
        "readers.c.cache.size : 4",
        f"old : {ref(Reader)}",
        "old.timeout_s : 3",
        *(f"old.{line}" for line in cache),
    )
    first, second = found.readers.values()
    assert (first.timeout_ms, first.cache.size) == (1000, 8)
    assert (second.timeout_ms, second.cache.size) == (2, 4)
    assert (found.reader.timeout_ms, found.reader.cache.size) == (3000, 8)


def test_the_migrations_of_a_base_class_come_first() -> None:
    lines = ["timeout_s : 2", 'folder : "a"']
    found = read(f". : {ref(FileReader)}", *lines)
    assert (found.timeout_ms, found.folder) == (2000, "/a")
    found = read(f". : {ref(FileReader, FileReader=2)}", "timeout_s : 2", 'folder : "/a"')
    assert (found.timeout_ms, found.folder) == (2000, "/a")
    found = read(f". : {ref(FileReader, Reader=3)}", "timeout_ms : 2", 'folder : "a"')
    assert (found.timeout_ms, found.folder) == (2, "/a")


def test_a_renamed_class_keeps_its_version() -> None:
    rename_class(f"{__name__}:OldCache", f"{__name__}:Cache")
    text = f'. : Params("{__name__}:OldCache", {{"{__name__}:OldCache": %d}})\nsize : 4'
    assert read(text % 1).size == 8
    assert read(text % 2).size == 4


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([f". : {ref(Reader, Reader=4)}"],
         r"line 1, .*:Reader has version 4 in the text, but 3 in the code: a newer version"),
        ([f". : {ref(Plain, Plain=2)}"], r":Plain has version 2 in the text, but 1 in the code"),
        ([f". : {ref(Holder)}", f"reader : {ref(FileReader, Reader=9)}"],
         r"line 2, 'reader.*:Reader has version 9 in the text, but 3"),
    ],
)  # fmt: skip
def test_a_newer_version_is_a_named_error(lines: list[str], message: str) -> None:
    with pytest.raises(NewerVersionError, match=message):
        read(*lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([f". : {ref(Cache)}"],
         r"line 1, .*migration of .*Cache.Params from version 1 failed: KeyError: 'size'"),
        ([f". : {ref(Reader)}", "timeout_s : 1", "limi : 2"], r"has no field limi; did you mean"),
        ([f". : {ref(Reader)}", "timeout_s : 1", "limit : x"], r"^line 3, 'limit : x': x is not"),
        ([f'. : Params("{__name__}:Cache", 2)'], r"versions of Params must be .*, given int 2"),
        ([f'. : Params("{__name__}:Cache", {{"a": True}})'], r"versions of Params must be"),
        ([f'. : Params("{__name__}:Cache", {{"a": 0}})'], r"versions of Params must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_migrated_is_reported(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(*lines)


def test_a_class_needs_a_migration_from_every_earlier_version() -> None:
    with pytest.raises(TypeError, match="has version 3, but no migration from version 2"):

        class Missing(Params):
            version = 3
            migrations: ClassVar[dict[int, Migration]] = {1: _double}

    with pytest.raises(TypeError, match="has version 1, but a migration from version 1: set"):

        class Unused(Params):
            migrations: ClassVar[dict[int, Migration]] = {1: _double}

    with pytest.raises(TypeError, match="version is 0, but versions count from 1"):

        class Zero(Params):
            version = 0


def test_version_stays_a_name_for_fields() -> None:
    class Data(Params):
        version: int = param("Version of the data.", default=2)

    assert Data(version=3).version == 3


def test_a_setting_takes_params_with_their_version() -> None:
    tree = Holder.Params()
    tree.set_text("reader", ref(FileReader, FileReader=2, Reader=3))
    assert isinstance(tree.reader, FileReader.Params)
    with pytest.raises(ValueError, match="Reader has version 4 in the text"):
        tree.set_text("reader", ref(FileReader, Reader=4))
