"""Tests of all classes: Params can be created, frozen and written as text; layers state shapes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tekso.framework.layer import Layer
from tekso.framework.params import Configurable, Params

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("framework", "models", "tasks", "params", "tools")


def import_all() -> None:
    for name in PACKAGES:
        package = importlib.import_module(f"tekso.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"tekso.{name}."):
            importlib.import_module(module.name)


def derived(base: Any) -> Iterator[Any]:
    """Yields a class and all classes that derive from it, if they are defined in Tekso."""
    if base.__module__.startswith(tuple(f"tekso.{package}." for package in PACKAGES)):
        yield base
    for subclass in base.__subclasses__():
        yield from derived(subclass)


def name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


import_all()
OWNERS = {name(kind): kind for kind in derived(Configurable)}
PARAMS = {name(kind): kind for kind in derived(Params)}
LAYERS = {
    name(kind): kind
    for kind in derived(Layer)
    if kind is not Layer
    and not kind.__name__.startswith("_")
    and kind.__module__.startswith(("tekso.framework.", "tekso.models.", "tekso.tasks."))
}


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


def test_every_public_layer_documents_its_shapes() -> None:
    assert len(LAYERS) > 40
    without = sorted(kind for kind, layer in LAYERS.items() if not _documents_shapes(layer))
    assert not without, f"the docstring of the class has no section `Shapes:`: {without}"


def test_shapes_of_a_base_class_do_not_count() -> None:
    base = type("Base", (), {"__doc__": "A base.\n\n    Shapes:\n      x: [batch, dim]"})
    assert _documents_shapes(base)
    assert not _documents_shapes(type("Sub", (base,), {}))
    assert not _documents_shapes(type("Sub", (base,), {"__doc__": "A subclass."}))


def _documents_shapes(kind: type) -> bool:
    return "Shapes:" in (vars(kind).get("__doc__") or "")


def params_in_sources() -> Iterator[str]:
    """Yields the names of all classes in Tekso whose names end in `Params`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(["tekso", *path.relative_to(ROOT).with_suffix("").parts])
            yield from _params_in(ast.parse(path.read_text()), f"{module}:")


def _params_in(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            if child.name.endswith("Params"):
                yield prefix + child.name
            yield from _params_in(child, f"{prefix}{child.name}.")
