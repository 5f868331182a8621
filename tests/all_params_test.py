"""Every Params class of every room: it can be made, frozen, written and read back."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from tekso.framework.params import Configurable, Params

ROOMS = ("framework", "models", "tasks", "params")


def modules() -> Iterator[str]:
    for room in ROOMS:
        package = importlib.import_module(f"tekso.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"tekso.{room}."):
            yield module.name


def owners_in(module: str) -> list[Any]:
    """The configurable classes that a module defines."""
    found = vars(importlib.import_module(module)).values()
    return [
        value
        for value in found
        if isinstance(value, type)
        and issubclass(value, Configurable)
        and value.__module__ == module
    ]


@pytest.mark.parametrize("module", sorted(modules()))
def test_all_params_of_a_module_survive_as_text(module: str) -> None:
    for owner in owners_in(module):
        params = owner.Params()
        assert Params.from_text(params.to_text()) == params
        assert params.copy().freeze() == params
