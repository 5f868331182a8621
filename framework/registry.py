"""The registry of experiments: `@register`, and lookup by key.

A key consists of a module path and a class name. The module path begins after the last package
named `params`: class `Tiny` in `tekso.params.lm.python_source` has the key `lm.python_source.Tiny`.
Without such a package it is the whole path: `their_package.experiments.Mine`. A lookup imports only
the module in the key.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tekso.framework.experiment import Experiment
from tekso.framework.params import references
from tekso.framework.spelling import close_matches

PACKAGE = "tekso.params"

T = TypeVar("T", bound=Experiment)


class UnknownExperimentError(LookupError):
    """There is no experiment with this key."""


class DuplicateExperimentError(ValueError):
    """Two experiments have the same key."""


@dataclass(frozen=True)
class Entry:
    """A registered experiment."""

    key: str
    cls: type[Experiment]
    summary: str  # first line of the docstring
    file: str
    line: int


_ENTRIES: dict[str, Entry] = {}
_NO_EXPERIMENTS = re.compile(r"__main__|conftest|tests|test_.*|.*_test")


def register(cls: type[T]) -> type[T]:
    """Registers an experiment class under the key of its module and name.

    In a notebook or an interactive Python, a class replaces an earlier class with the same key, so
    that a cell can be changed and run again.

    Raises:
      DuplicateExperimentError: another class has the same key; the message has both source lines.
      TypeError: the class is not an Experiment.
    """
    if not (isinstance(cls, type) and issubclass(cls, Experiment)):
        raise TypeError(f"@register requires a subclass of Experiment, given {cls!r}")
    frame = sys._getframe(1)
    key = key_of(cls)
    entry = Entry(key, cls, _summary(cls), frame.f_code.co_filename, frame.f_lineno)
    known = _ENTRIES.get(key)
    same_lines = known is not None and (known.file, known.line) == (entry.file, entry.line)
    if known is not None and not same_lines and not _is_interactive(cls.__module__):
        raise DuplicateExperimentError(
            f"two experiments have the key {key}: {known.file}:{known.line} and "
            f"{entry.file}:{entry.line}"
        )
    _ENTRIES[key] = entry  # replaces the entry with the same lines if the module is reloaded
    return cls


def _is_interactive(module: str) -> bool:
    """Returns whether a module is the `__main__` of a notebook or interactive Python."""
    return module == "__main__" and not hasattr(sys.modules.get(module), "__file__")


def key_of(cls: type[Experiment]) -> str:
    """Returns the key of an experiment class, whether it is registered or not."""
    return f"{_module_key(cls.__module__)}.{cls.__name__}"


def get(key: str) -> type[Experiment]:
    """Returns the experiment with a key; imports only its module.

    Errors raised by that module are not caught.

    Raises:
      UnknownExperimentError: there is no such experiment; the message suggests similar keys.
    """
    key = key.strip().removeprefix(PACKAGE + ".")
    if key in _ENTRIES:
        return _ENTRIES[key].cls
    modules = list(_modules_on_disk())
    module = key.rpartition(".")[0]
    if module in modules:
        importlib.import_module(f"{PACKAGE}.{module}")
    if key in _ENTRIES:
        return _ENTRIES[key].cls
    raise UnknownExperimentError(_explain(key, modules))


def has_module(key: str) -> bool:
    """Returns whether the module of a key exists below `tekso.params`, without importing it."""
    return key.strip().removeprefix(PACKAGE + ".").rpartition(".")[0] in _modules_on_disk()


def import_package(name: str) -> None:
    """Imports a package with all its submodules, which registers its experiments.

    Tests and `__main__` are not imported. A package in the working directory is found even if the
    working directory is not on `sys.path`. Errors raised by its modules are not caught.
    """
    if name.partition(".")[0] not in sys.modules and os.getcwd() not in sys.path:
        importlib.invalidate_caches()
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            sys.path.append(os.getcwd())
    references.allow_imports(name)
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if not _NO_EXPERIMENTS.fullmatch(module.name):
            import_package(f"{name}.{module.name}")


def list_experiments(pattern: str = "*") -> list[Entry]:
    """Returns the experiments whose keys match a wildcard pattern, sorted.

    Imports all modules below `tekso.params` whose experiments may match: those whose keys agree
    with the pattern up to its first wildcard.
    """
    start = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    for module in _modules_on_disk():
        above = _module_key(f"{PACKAGE}.{module}") + "."
        if above.startswith(start) or start.startswith(above):
            importlib.import_module(f"{PACKAGE}.{module}")
    found = [entry for key, entry in _ENTRIES.items() if fnmatch.fnmatchcase(key, pattern)]
    return sorted(found, key=lambda entry: _natural(entry.key))


def like(pattern: str) -> list[str]:
    """Returns suggestions for a wildcard pattern that matches no key; imports all modules.

    The suggestions are the keys that contain the pattern's words in any case, or, if there are
    none, similar keys.
    """
    keys = {entry.key.casefold(): entry.key for entry in list_experiments()}
    words = [word for word in re.split(r"[*?]+", pattern.casefold()) if word.strip(".")]
    if not words:
        return []
    found = [folded for folded in keys if all(word in folded for word in words)]
    found = found or close_matches("".join(words), keys, count=5)
    return [keys[folded] for folded in found]


def _module_key(module: str) -> str:
    parts = module.split(".")
    packages = parts[:-1]
    if "params" in packages:
        last = len(packages) - 1 - packages[::-1].index("params")
        return ".".join(parts[last + 1 :])
    return module


def _summary(cls: type) -> str:
    doc = inspect.getdoc(cls)
    return doc.strip().partition("\n")[0] if doc else ""


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Returns a sort key by which Layers3 comes before Layers13."""
    parts = re.findall(r"\d+|\D+", key)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _modules_on_disk() -> Iterator[str]:
    """Yields the names of the modules below `tekso.params`, relative to it; imports none."""
    yield from _walk(importlib.import_module(PACKAGE).__path__, "")


def _walk(folders: Iterable[str], prefix: str) -> Iterator[str]:
    for module in pkgutil.iter_modules(folders):
        if module.ispkg:
            below = [os.path.join(folder, module.name) for folder in folders]
            yield from _walk(below, f"{prefix}{module.name}.")
        else:
            yield prefix + module.name


def _explain(key: str, modules: list[str]) -> str:
    """Returns an error message for an unknown key, depending on which part of it is wrong."""
    module, _, name = key.rpartition(".")
    registered = {known.rpartition(".")[0] for known in _ENTRIES}
    if key in modules or key in registered:
        if key in modules:
            importlib.import_module(f"{PACKAGE}.{key}")
        return f"{key!r} is a module; its experiments are: {_listed(key)}"
    if module and _is_class(module, name):
        return f"{key} is a class that is not registered: put @register above it"
    if module in modules or module in registered:
        close = close_matches(name, _classes_in(module), cutoff=0.5)
        keys = [f"{module}.{match}" for match in close]
        listed = _listed(module)
        has = "" if keys == [listed] else f" It has: {listed}"
        return f"{module} has no experiment {name!r}{_did_you_mean(keys) or '.'}{has}"
    everything = sorted({*modules, *registered})
    close = close_matches(module or key, everything)
    keys = [f"{match}.{found}" for match in close for found in _close_classes(match, name)]
    hint = _did_you_mean((keys or _with_class(name, everything))[:3]) or "."
    package = module.partition(".")[0]
    packages = {known.partition(".")[0] for known in everything}
    if package and package not in packages and package not in sys.modules:
        hint += (
            f" If {package} is your own package, import it first (--import={package}; in Python, "
            f"import {module})."
        )
    shown = ", ".join(everything) or "none"
    return f"there is no experiment {key!r}{hint} Modules with experiments: {shown}"


def _is_class(module: str, name: str) -> bool:
    """Returns whether an imported module, in `tekso.params` or by its full name, has a class."""
    found = sys.modules.get(f"{PACKAGE}.{module}") or sys.modules.get(module)
    return isinstance(getattr(found, name, None), type)


def _did_you_mean(keys: Iterable[str]) -> str:
    found = list(dict.fromkeys(keys))
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _listed(module: str) -> str:
    keys = sorted((key for key in _ENTRIES if key.rpartition(".")[0] == module), key=_natural)
    return ", ".join(keys) or "none"


def _classes_in(module: str) -> list[str]:
    """Returns the names of a module's experiments: those registered, and those in its source."""
    names = [key.rpartition(".")[2] for key in _ENTRIES if key.rpartition(".")[0] == module]
    for folder in importlib.import_module(PACKAGE).__path__:
        file = os.path.join(folder, *module.split(".")) + ".py"
        if os.path.isfile(file):
            with open(file, encoding="utf-8", errors="replace") as source:
                names += re.findall(r"^@register\b.*\n(?:@.*\n)*class (\w+)", source.read(), re.M)
    return list(dict.fromkeys(names))


def _close_classes(module: str, name: str) -> list[str]:
    return close_matches(name, _classes_in(module), count=1, cutoff=0.5)


def _with_class(name: str, modules: Iterable[str]) -> list[str]:
    """Returns the keys of the experiments with a name, or else with the most similar names."""
    keys: dict[str, list[str]] = {}
    for module in modules:
        for found in _classes_in(module):
            keys.setdefault(found, []).append(f"{module}.{found}")
    same = [found for found in keys if found.casefold() == name.casefold()]
    names = same or close_matches(name, keys, cutoff=0.75)
    return [key for found in names for key in keys[found]]
