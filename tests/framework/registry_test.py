"""The registry: keys, lazy imports, misses, and packages of users."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tekso.framework import registry
from tekso.framework.experiment import Experiment

EXPERIMENT = """from tekso.framework.experiment import Experiment
from tekso.framework.registry import register


@register
class {name}(Experiment):
    \"\"\"Summary of {name}.

    More of it.
    \"\"\"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path; what is imported from it and registered is forgotten afterwards."""
    modules, entries = set(sys.modules), dict(registry._ENTRIES)
    registry._ENTRIES.clear()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    registry._ENTRIES.clear()
    registry._ENTRIES.update(entries)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def rooms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for tekso.params with two good modules and a broken one."""
    write(folder, "rooms/params/lm/python_source.py", EXPERIMENT.format(name="Tiny"))
    write(
        folder,
        "rooms/params/lm/gpipe.py",
        "".join(EXPERIMENT.format(name=f"Layers{depth}") for depth in (103, 13, 3)),
    )
    write(folder, "rooms/params/mt/broken.py", "import no_such_dependency\n")
    monkeypatch.setattr(registry, "PACKAGE", "rooms.params")
    return folder


def write(folder: Path, path: str, text: str) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    package = file.parent
    while package != folder:
        (package / "__init__.py").touch()
        package = package.parent
    file.write_text(text)
    importlib.invalidate_caches()


def loaded() -> list[str]:
    return sorted(name for name in sys.modules if name.startswith("rooms.params."))


def miss(key: str) -> str:
    with pytest.raises(registry.UnknownExperimentError) as caught:
        registry.get(key)
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "key"),
    [
        ("tekso.params.lm.python_source", "lm.python_source.Tiny"),
        ("their.params.a.params.lm.mine", "lm.mine.Tiny"),
        ("their_package.experiments", "their_package.experiments.Tiny"),
        ("their_package.params", "their_package.params.Tiny"),
        ("mine", "mine.Tiny"),
    ],
)
def test_the_key_comes_from_the_module(module: str, key: str) -> None:
    assert registry.key_of(type("Tiny", (Experiment,), {"__module__": module})) == key


def test_only_the_module_asked_for_is_imported(rooms: Path) -> None:
    cls = registry.get("lm.python_source.Tiny")
    assert cls.__name__ == "Tiny" and issubclass(cls, Experiment)
    assert loaded() == ["rooms.params.lm", "rooms.params.lm.python_source"]
    assert registry.get("lm.python_source.Tiny") is cls
    assert registry.get("rooms.params.lm.python_source.Tiny") is cls


def test_a_miss_imports_nothing_and_suggests_from_the_level_of_the_typo(rooms: Path) -> None:
    assert "did you mean lm.python_source.Tiny?" in miss("lm.python_sorce.Tiny")
    assert "did you mean lm.python_source.Tiny?" in miss("lm.python_sorce.Tinny")
    assert "did you mean lm.python_source.Tiny?" in miss("Tiny")
    text = miss("zzz")
    assert "no experiment 'zzz'" in text and "lm.gpipe, lm.python_source, mt.broken" in text
    assert loaded() == []


def test_only_experiments_that_exist_are_suggested(rooms: Path) -> None:
    write(rooms, "nrx.py", EXPERIMENT.format(name="Mine"))
    registry.import_package("nrx")
    text = miss("nry.Rep")
    assert "did you mean" not in text and "nrx.Rep" not in text
    assert "no experiment 'nry.Rep'. If nry is your own package, import it first (--" in text
    assert "(--import=nry; in Python, import nry.parts)" in miss("nry.parts.Rep")
    assert "did you mean nrx.Mine?" in miss("nry.Mime")
    assert "--import" not in miss("lm.python_sorce.Zebra") + miss("zzz")


def test_a_misspelt_name_without_its_module_is_found(rooms: Path) -> None:
    write(rooms, "nrx.py", EXPERIMENT.format(name="Tagger"))
    registry.import_package("nrx")
    assert "no experiment 'Taggr'; did you mean nrx.Tagger? Modules with" in miss("Taggr")
    assert miss("nrx.Taggr").endswith("no experiment 'Taggr'; did you mean nrx.Tagger?")


def test_a_class_that_is_not_registered_is_found(rooms: Path) -> None:
    plain = EXPERIMENT.format(name="Forgotten").replace("@register\n", "")
    write(rooms, "rooms/params/lm/mine.py", EXPERIMENT.format(name="Tiny") + plain)
    assert "lm.mine.Forgotten is a class that is not registered: put @register" in (
        miss("lm.mine.Forgotten")
    )
    assert "lm.mine has no experiment 'Forgot'" in miss("lm.mine.Forgot")


def test_a_miss_in_a_module_names_its_experiments(rooms: Path) -> None:
    text = miss("lm.gpipe.Layer13")
    assert "lm.gpipe has no experiment 'Layer13'; did you mean lm.gpipe.Layers13" in text
    assert "? It has: lm.gpipe.Layers3, lm.gpipe.Layers13, lm.gpipe.Layers103" in text
    assert "has no experiment 'Zzz'. It has: lm.gpipe.Layers3," in miss("lm.gpipe.Zzz")
    assert "rooms.params.lm.python_source" not in loaded()
    assert "'lm.gpipe' is a module; its experiments are: lm.gpipe.Layers3" in miss("lm.gpipe")


def test_a_broken_import_surfaces_as_itself(rooms: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        registry.get("mt.broken.Any")
    assert caught.value.name == "no_such_dependency" and caught.value.__cause__ is None
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.list_experiments()


def test_the_list_has_key_summary_and_source_line(rooms: Path) -> None:
    (rooms / "rooms/params/mt/broken.py").unlink()
    entries = registry.list_experiments("lm.gpipe.*")
    assert [entry.key for entry in entries] == [
        "lm.gpipe.Layers3",
        "lm.gpipe.Layers13",
        "lm.gpipe.Layers103",
    ]
    first = registry.list_experiments("*.Tiny")[0]
    assert first.summary == "Summary of Tiny." and first.cls.__name__ == "Tiny"
    assert Path(first.file) == rooms / "rooms/params/lm/python_source.py"
    assert "class Tiny" in Path(first.file).read_text().splitlines()[first.line]
    assert len(registry.list_experiments()) == 4 and registry.list_experiments("no.*") == []


@pytest.mark.parametrize("pattern", ["lm.gpipe.*", "lm.gpi*", "lm.gpipe.Layers[13]*"])
def test_a_list_imports_no_module_whose_key_does_not_begin_as_the_pattern(
    rooms: Path, pattern: str
) -> None:
    assert len(registry.list_experiments(pattern)) == 3  # without an error of mt.broken
    assert loaded() == ["rooms.params.lm", "rooms.params.lm.gpipe"]


def test_what_the_list_does_not_have_is_looked_for_inside_of_keys_and_then_close_to_them(
    rooms: Path,
) -> None:
    (rooms / "rooms/params/mt/broken.py").unlink()
    assert registry.like("tiny") == registry.like("*.TINY") == ["lm.python_source.Tiny"]
    assert registry.like("layers1") == ["lm.gpipe.Layers13", "lm.gpipe.Layers103"]
    assert registry.like("lm.gpippe.Layers13")[0] == "lm.gpipe.Layers13"
    assert registry.like("zzz") == registry.like("*") == registry.like("") == []


def test_duplicates_name_both_source_lines(folder: Path) -> None:
    write(folder, "twice.py", EXPERIMENT.format(name="Tiny") * 2)
    with pytest.raises(registry.DuplicateExperimentError) as caught:
        registry.import_package("twice")
    text = str(caught.value)
    lines = [
        number
        for number, line in enumerate((folder / "twice.py").read_text().splitlines(), start=1)
        if line == "@register"
    ]
    assert "twice.Tiny" in text
    assert all(f"{folder / 'twice.py'}:{line}" in text for line in lines) and len(lines) == 2


def test_a_module_may_be_reloaded(folder: Path) -> None:
    write(folder, "again.py", EXPERIMENT.format(name="Tiny"))
    registry.import_package("again")
    before = registry.get("again.Tiny")
    importlib.reload(sys.modules["again"])
    assert registry.get("again.Tiny") is not before


def test_experiments_of_a_users_package(rooms: Path) -> None:
    write(rooms, "their_package/deep/experiments.py", EXPERIMENT.format(name="Mine"))
    write(rooms, "their_package/params/own.py", EXPERIMENT.format(name="Other"))
    for name in ("__main__", "conftest", "deep/mine_test", "tests/anything"):
        write(rooms, f"their_package/{name}.py", "raise AssertionError('not to be imported')")
    assert "no experiment" in miss("their_package.deep.experiments.Mine")
    registry.import_package("their_package")
    assert registry.get("their_package.deep.experiments.Mine").__name__ == "Mine"
    assert registry.get("own.Other").__name__ == "Other"
    assert "did you mean their_package.deep.experiments.Mine?" in miss(
        "their_package.deep.experiment.Mine"
    )
    assert "did you mean own.Other" in miss("own.Othr")
    assert not any(name.startswith("rooms.params.lm.") for name in sys.modules)


def test_a_users_package_is_found_in_the_working_directory(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    write(work, "package_here/mine.py", EXPERIMENT.format(name="Mine"))
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    registry.import_package("package_here")
    assert registry.get("package_here.mine.Mine").__name__ == "Mine"


def test_a_broken_or_missing_users_package_surfaces_as_itself(folder: Path) -> None:
    write(folder, "broken_package/fine.py", "")
    write(folder, "broken_package/wrong.py", "1 / 0")
    with pytest.raises(ZeroDivisionError):
        registry.import_package("broken_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        registry.import_package("no_such_package")


def test_only_experiments_are_registered() -> None:
    with pytest.raises(TypeError, match="a subclass of Experiment"):
        registry.register(int)  # type: ignore[type-var]


@pytest.mark.parametrize("has_file", [False, True])
def test_a_changed_cell_of_a_notebook_replaces_its_experiment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool
) -> None:
    main = types.ModuleType("__main__")
    if has_file:  # a script
        main.__file__ = "script.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    cells = [compile(EXPERIMENT.format(name="Mine"), f"<cell {i}>", "exec") for i in (1, 2)]
    exec(cells[0], main.__dict__)
    first = main.__dict__["Mine"]
    if has_file:
        with pytest.raises(registry.DuplicateExperimentError, match="<cell 1>"):
            exec(cells[1], main.__dict__)
        return
    exec(cells[1], main.__dict__)
    assert registry.get("__main__.Mine") is main.__dict__["Mine"] is not first
