"""Texts of Params from before a rename stay readable: of classes, fields and values."""

from __future__ import annotations

from typing import Literal

import pytest

from tekso.framework.execution import DataParallel, MeshSharded, Pipelined
from tekso.framework.params import Configurable, Params, param, references, rename_class


class Child(Configurable):
    class Params(Configurable.Params):
        width: int = param("A size.", default=3, old_names=["size", "dim"])


class Parent(Configurable):
    class Params(Configurable.Params):
        mode: Literal["one", "two"] = param("A choice.", default="one", old_values={"zwei": "two"})
        child: Child.Params = param("A child.", default=Child.Params(), old_names=["kid"])
        optional: Child.Params | None = param("Another.", default=None, old_names=["other"])


class Narrow(Child):
    class Params(Child.Params):
        width = param("A size.", default=1)


HERE = f"{__name__}:Parent"


def read(*lines: str) -> Parent.Params:
    found = Params.from_text("\n".join([f'. : Params("{HERE}")', *lines]))
    assert isinstance(found, Parent.Params)
    return found


def test_old_names_of_fields_are_read_also_on_the_way_to_a_child() -> None:
    child = f'Params("{__name__}:Child")'
    found = read(f"kid : {child}", "kid.size : 5", f"other : {child}", "other.dim : 7")
    assert (found.child.width, found.optional.width) == (5, 7)  # type: ignore[union-attr]
    assert read("child.width : 4").child.width == 4


def test_old_values_are_read_as_the_new_ones() -> None:
    assert read('mode : "zwei"').mode == "two"
    assert read('mode : "two"').mode == "two"
    with pytest.raises(ValueError, match="three"):
        read('mode : "three"')


def test_what_is_written_has_the_new_names_alone() -> None:
    text = read('mode : "zwei"', f'kid : Params("{__name__}:Child")', "kid.size : 5").to_text()
    assert "kid" not in text and "zwei" not in text
    assert "child.width : 5" in text and 'mode : "two"' in text


def test_a_field_with_another_default_keeps_its_old_names() -> None:
    found = Params.from_text(f'. : Params("{__name__}:Narrow")\nsize : 9')
    assert found.get("width") == 9


def test_an_old_name_elsewhere_is_an_error_that_says_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"no field kid: it is child now"):
        Parent.Params().set({"kid.width": 2})
    with pytest.raises(AttributeError, match=r"no field child.size: it is child.width now"):
        Parent.Params().set_text("child.size", "2")


def test_a_class_that_was_renamed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "RENAMED", {})
    rename_class("my_old_lab.models:Elder", HERE)
    found = Params.from_text('. : Params("my_old_lab.models:Elder")\nmode : "two"')
    assert type(found) is Parent.Params and found.mode == "two"
    with pytest.raises(ValueError, match="my_old_lab"):
        Params.from_text('. : Params("my_old_lab.models:Other")')


@pytest.mark.parametrize("execution", [DataParallel, MeshSharded, Pipelined])
def test_runs_from_before_say_what_xla_compiles(execution: type[Configurable]) -> None:
    name = f"{execution.__module__}:{execution.__name__}"
    found = Params.from_text(f'. : Params("{name}")\nxla : "stretches"')
    assert found.get("xla") == "clusters"
