"""Texts of Params from before a rename stay readable: of classes, fields and values."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest

from tekso.framework.execution import (
    DataParallel,
    MeshSharded,
    Pipelined,
    SpmdPipelined,
    StagesOnMesh,
)
from tekso.framework.params import Configurable, OldField, Params, param, references, rename_class


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


class Above(Configurable):
    class Params(Configurable.Params):
        parents: list[Parent.Params] = param("Children.", default=[], old_names=["pair"])


class Holder(Configurable):
    class Params(Configurable.Params):
        first: Configurable.Params | None = param(
            "A child.", default=None, old_values={f"{__name__}:Child": f"{__name__}:Narrow"}
        )
        items: list[Configurable.Params] = param("Others.", default=[])


class Broad(Configurable):
    class Params(Configurable.Params):
        old_fields: ClassVar[dict[str, OldField]] = {
            "form": OldField("set kind instead", {"thin": f"{__name__}:Thin"}),
            "part": OldField("remove it"),
        }

        width: int = param("A size.", default=3)
        part_of: Child.Params = param("A child.", default=Child.Params())
        depth: int = param("Another size.", default=4)


class Thin(Configurable):
    class Params(Configurable.Params):
        old_fields: ClassVar[dict[str, OldField]] = {
            "depth": OldField("it is always 1"),
            "part": OldField("remove it"),
        }

        height: int = param("A size.", default=5)
        width: int = param("A size.", default=1)
        part_of: Child.Params = param("A child.", default=Child.Params())


HERE = f"{__name__}:Parent"


def read(*lines: str) -> Parent.Params:
    found = Params.from_text("\n".join([f'. : Params("{HERE}")', *lines]))
    assert isinstance(found, Parent.Params)
    return found


def test_old_names_are_read_on_the_way_through_several_levels() -> None:
    lines = (f"pair : [Params({HERE!r})]", f'pair.0.kid : Params("{__name__}:Child")')
    found = Params.from_text(
        "\n".join((f'. : Params("{__name__}:Above")', *lines, "pair.0.kid.size : 8"))
    )
    assert found.get("parents.0.child.width") == 8


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
    with pytest.raises(AttributeError, match=r"no field kid: it was renamed to child"):
        Parent.Params().set({"kid.width": 2})
    with pytest.raises(
        AttributeError,
        match=r"child \(Child.Params\) has no field size: it was renamed to child.width",
    ):
        Parent.Params().set_text("child.size", "2")


def test_a_class_that_was_renamed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "RENAMED", {})
    rename_class("my_old_lab.models:Elder", HERE)
    found = Params.from_text('. : Params("my_old_lab.models:Elder")\nmode : "two"')
    assert type(found) is Parent.Params and found.mode == "two"
    with pytest.raises(ValueError, match="my_old_lab"):
        Params.from_text('. : Params("my_old_lab.models:Other")')


def node(name: str) -> str:
    return f'Params("{__name__}:{name}")'


def test_a_child_of_a_class_that_was_replaced_is_read_as_the_new_class() -> None:
    found = Params.from_text(f". : {node('Holder')}\nfirst : {node('Child')}\nfirst.size : 5")
    assert type(found.get("first")) is Narrow.Params and found.get("first.width") == 5


def test_a_field_that_is_gone_is_skipped_with_all_below_it() -> None:
    lines = [f". : {node('Broad')}", f"part : {node('Child')}", "part.gone.deep : 1", "width : 2"]
    found = Params.from_text("\n".join(lines))
    assert found == Broad.Params(width=2)
    assert Broad.Params.from_text(found.to_text()) == found
    with pytest.raises(ValueError, match=r"line 2.*Broad.Params has no field other"):
        Params.from_text(f". : {node('Broad')}\nother : 1")


@pytest.mark.parametrize("path", ["", "first", "items.1"])
def test_a_value_of_a_field_that_is_gone_decides_the_class(path: str) -> None:
    above = {
        "": [f". : {node('Broad')}"],
        "first": [f". : {node('Holder')}", f"first : {node('Broad')}"],
        "items.1": [f". : {node('Holder')}", f"items : [{node('Child')}, {node('Broad')}]"],
    }
    below = [
        "part_of.size : 7",
        "form : {}",
        "depth : 9",
        f"part : {node('Child')}",
        "part.size : 1",
    ]
    text = "\n".join([*above[path], *(f"{path}.{line}".lstrip(".") for line in below)])

    def read_as(form: str) -> Any:
        whole = Params.from_text(text.replace("{}", form))
        return whole.get(path) if path else whole

    found = read_as('"thin"')
    assert type(found) is Thin.Params
    # A value that the text does not have is the default of the class of before.
    assert (found.width, found.height, found.part_of.width) == (3, 5, 7)
    assert found.origin("width") == "checkpoint" and found.origin("height") == "default"
    found = read_as('"broad"')
    assert type(found) is Broad.Params and (found.depth, found.part_of.width) == (9, 7)


def test_a_field_that_is_gone_is_an_error_that_says_what_to_do() -> None:
    for use in (lambda: Broad.Params(form="thin"), lambda: Broad.Params().set_text("form", "thin")):
        with pytest.raises(
            AttributeError, match=r"Broad.Params has no field form: set kind instead"
        ):
            use()


@pytest.mark.parametrize("execution", [DataParallel, MeshSharded, Pipelined])
def test_runs_from_before_say_what_xla_compiles(execution: type[Configurable]) -> None:
    name = f"{execution.__module__}:{execution.__name__}"
    found = Params.from_text(f'. : Params("{name}")\nxla : "stretches"')
    assert found.get("xla") == "clusters"


PIPELINE = """
num_stages : 4
num_micro_batches : 8
schedule : "{schedule}"
rematerialize : "all"
balance : None
costs : "traced"
num_replicas : 2
workers : []
form : "{form}"
stages_on : {stages_on}
{below}xla : "none"
"""
"""Of params.txt, when the form of a pipeline was a field."""


def pipeline(form: str, schedule: str, stages_on: str = "None", below: str = "") -> Params:
    owner = '. : Params("tekso.framework.execution.pipelined:Pipelined")'
    values = {"form": form, "schedule": schedule, "stages_on": stages_on, "below": below}
    return Params.from_text(owner + PIPELINE.format(**values))


def test_runs_from_before_have_the_execution_that_the_form_of_their_pipeline_is() -> None:
    sizes = {"num_stages": 4, "num_micro_batches": 8, "num_replicas": 2, "rematerialize": "all"}
    assert pipeline("spmd", "gpipe") == SpmdPipelined.Params().set(sizes)
    assert pipeline("host", "gpipe") == Pipelined.Params(schedule="gpipe").set(sizes)
    mesh = 'Params("tekso.framework.execution.mesh_sharded:MeshSharded")'
    names = {"mesh": "model:2", "rules": "tensor", "decode_on": "one_device", "xla": "auto"}
    below = "".join(f'stages_on.{name} : "{value}"\n' for name, value in names.items())
    on = StagesOnMesh.Params(mesh="model:2", rules="tensor")
    assert pipeline("host", "1f1b", mesh, below) == Pipelined.Params(stages_on=on).set(sizes)


def test_the_form_of_a_pipeline_is_an_error_that_names_the_execution() -> None:
    with pytest.raises(AttributeError, match=r"no field form: .* --execution=spmd_pipelined"):
        Pipelined.Params().set_text("form", "spmd")
