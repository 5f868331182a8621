"""Every primitive is declared in one place, with its forms for meshes and for the cost model."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import context, ops, primitive, workarounds
from tekso.framework.context import StepContext, filling_in_place
from tekso.framework.execution.mesh import activations
from tekso.framework.execution.pipeline import spmd_loss
from tekso.framework.execution.replica_context import ReplicaContext
from tekso.framework.primitive import PRIMITIVES, Table

MOST_PUBLIC_MEMBERS = 16


@pytest.mark.parametrize("table", ["mesh", "planning"])
def test_each_form_that_a_primitive_declares_is_found_and_no_other_is_written(table: Table) -> None:
    found = primitive.forms(table)
    assert found.keys() == {name for name, p in PRIMITIVES.items() if p.homes[table] is not None}
    for home in {p.homes[table] for p in PRIMITIVES.values()} - {None}:
        module, _, within = str(home).partition(":")
        holder: Any = importlib.import_module(module)
        written = {
            name
            for name, value in vars(getattr(holder, within) if within else holder).items()
            if name in PRIMITIVES and inspect.isfunction(value)
        }
        assert written == {name for name, p in PRIMITIVES.items() if home in p.homes.values()}


@pytest.mark.parametrize(
    "table",
    [
        primitive.forms("mesh"),
        primitive.forms("planning"),
        ReplicaContext.forms,
        activations._RecordingContext.forms,
        spmd_loss._StageContext.forms,
        filling_in_place(StepContext()).forms,
    ],
    ids=["mesh", "planning", "replicas", "constraints", "stages", "in_place"],
)
def test_forms_take_what_the_primitive_takes(table: Mapping[str, Any]) -> None:
    assert table
    for name, form in table.items():
        own = inspect.signature(form).parameters.values()
        if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in own):
            continue  # hands all on
        plain = inspect.signature(PRIMITIVES[name].plain).parameters.values()
        taken, expected = ([(p.name, p.kind, p.default) for p in ps][1:] for ps in (own, plain))
        assert taken == expected, name  # besides the context


@pytest.fixture
def declared() -> Iterator[None]:
    """Removes primitives that a test declares."""
    before = dict(PRIMITIVES)
    yield
    PRIMITIVES.clear()
    PRIMITIVES.update(before)


@pytest.mark.usefixtures("declared")
def test_a_primitive_is_declared_in_one_place() -> None:
    @primitive.primitive(mesh=f"{__name__}:MeshForms", planning=None)
    def doubled(ctx: StepContext, x: int) -> int:
        return 2 * x

    assert doubled(StepContext(), 3) == 6
    on_mesh = StepContext()
    on_mesh.forms = primitive.forms("mesh")
    assert doubled(on_mesh, 3) == -6
    assert "doubled" not in primitive.forms("planning")


class MeshForms:
    """The place of a form for meshes."""

    @staticmethod
    def doubled(ctx: StepContext, x: int) -> int:
        return -2 * x


@pytest.mark.usefixtures("declared")
def test_a_form_that_is_not_written_is_an_error_with_its_place() -> None:
    @primitive.primitive(mesh="tekso.framework.execution.mesh.forms", planning=None)
    def forgotten(ctx: StepContext) -> None: ...

    with pytest.raises(LookupError, match=r"mesh\.forms has no function forgotten, which @prim"):
        primitive.forms("mesh")


def test_a_context_computes_its_own_form_of_a_primitive() -> None:
    def doubled(ctx: StepContext, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        return 2 * ops.lookup.plain(ctx, table, ids)

    own = StepContext()
    own.forms = {"lookup": doubled}
    table, ids = tf.constant([[1.0], [3.0]]), tf.constant([1])
    assert ops.lookup(StepContext(), table, ids).numpy().tolist() == [[3.0]]
    assert ops.lookup(own, table, ids).numpy().tolist() == [[6.0]]
    assert ops.lookup(own.fold(1), table, ids).numpy().tolist() == [[6.0]]


def test_a_primitive_is_no_method_of_the_context() -> None:
    with pytest.raises(AttributeError, match=r"write ops\.project\(ctx, …\)"):
        StepContext().project(tf.ones([1, 2]), tf.ones([2, 2]))
    with pytest.raises(
        AttributeError, match=r"write workarounds\.capture\(ctx, …\), with `from tek"
    ):
        StepContext().capture(())
    assert workarounds.capture(StepContext(), (1,)) == (1,)
    with pytest.raises(AttributeError, match=r"'training'; did you mean 'is_training'\? It has: "):
        _ = StepContext().training
    with pytest.raises(AttributeError, match=r"'nothing'; it has: .*is_training.* uniform$"):
        StepContext().nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"'randn'; .*ctx\.normal\(self, shape\)"):
        StepContext().randn  # noqa: B018
    with pytest.raises(AttributeError, match=r"'_nothing'$"):
        StepContext()._nothing  # noqa: B018


def test_the_import_of_a_primitive_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"alone": "my_ops", "within": "my_lab.my_ops"}
    for name, module in modules.items():
        monkeypatch.setitem(context.PRIMITIVE_MODULES, name, module)
    with pytest.raises(AttributeError, match=r"with `import my_ops`$"):
        StepContext().alone(1)
    with pytest.raises(AttributeError, match=r"with `from my_lab import my_ops`$"):
        StepContext().within(1)


def test_the_context_stays_small() -> None:
    members = {name for name in {*dir(StepContext()), *vars(StepContext())} if name[0] != "_"}
    assert len(members) <= MOST_PUBLIC_MEMBERS, sorted(members)
    text = StepContext.__doc__ or ""
    listed = set(re.findall(r"\w+", " ".join(re.findall(r"^      ([\w, ]+):", text, re.M))))
    own = {name for name in members if getattr(vars(StepContext).get(name), "__doc__", None)}
    assert members <= listed | own, members - listed - own
