"""Every Params class of every room: it can be made, frozen, written and read back."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tekso.framework.params import Configurable, Params

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("framework", "models", "tasks", "params", "tools")


def import_all() -> None:
    for room in ROOMS:
        package = importlib.import_module(f"tekso.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"tekso.{room}."):
            importlib.import_module(module.name)


def derived(base: Any) -> Iterator[Any]:
    """Yields a class of the rooms, and all classes of the rooms that derive from it."""
    if base.__module__.startswith(tuple(f"tekso.{room}." for room in ROOMS)):
        yield base
    for subclass in base.__subclasses__():
        yield from derived(subclass)


def name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


import_all()
OWNERS = {name(kind): kind for kind in derived(Configurable)}
PARAMS = {name(kind): kind for kind in derived(Params)}


@pytest.mark.parametrize("kind", sorted(PARAMS))
def test_params_survive_as_text_and_as_a_frozen_copy(kind: str) -> None:
    params = PARAMS[kind]()
    read = Params.from_text(params.to_text())
    assert read == params and type(read) is PARAMS[kind]
    frozen = params.copy().freeze()
    assert frozen == params and frozen.is_frozen and not params.is_frozen


def test_no_params_class_is_left_out() -> None:
    assert {name(owner.Params) for owner in OWNERS.values()} <= set(PARAMS)
    assert all(owner.Params.owner is owner for owner in OWNERS.values())
    written = set(params_in_sources())
    assert len(written) > 100
    assert written <= set(PARAMS)


def params_in_sources() -> Iterator[str]:
    """Yields the names of the classes `Params`, or `…Params(Params)`, that the rooms define."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            module = ".".join(["tekso", *path.relative_to(ROOT).with_suffix("").parts])
            yield from _params_in(ast.parse(path.read_text()), f"{module}:")


def _params_in(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            if child.name.endswith("Params"):
                yield prefix + child.name
            yield from _params_in(child, f"{prefix}{child.name}.")
