"""Every primitive is found in one table, and somebody has decided what it does on a mesh."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.execution.data_parallel_program import ReplicaContext
from tekso.framework.execution.mesh import activations, forms
from tekso.framework.execution.pipeline import spmd_loss
from tekso.framework.planning import tracing
from tekso.framework.primitive import PROPAGATED

MOST_PUBLIC_MEMBERS = 14


def test_each_primitive_has_a_form_on_a_mesh_or_is_declared_to_need_none() -> None:
    missing = ops.PRIMITIVES.keys() - PROPAGATED - forms.FORMS.keys()
    assert not missing, f"add forms in {forms.__file__}, or declare them @propagated_primitive"
    assert forms.FORMS.keys() == ops.PRIMITIVES.keys() - PROPAGATED


@pytest.mark.parametrize(
    "table",
    [
        forms.FORMS,
        ReplicaContext.forms,
        activations._RecordingContext.forms,
        spmd_loss._StageContext.forms,
        tracing._TracingContext.forms,
    ],
    ids=["mesh", "replicas", "constraints", "stages", "tracing"],
)
def test_forms_take_what_the_primitive_takes(table: dict[str, Any]) -> None:
    for name, form in table.items():
        own = inspect.signature(form).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in own):
            continue  # hands all on
        plain = inspect.signature(ops.PRIMITIVES[name]).parameters.values()
        taken, expected = ([(p.name, p.kind, p.default) for p in ps][1:] for ps in (own, plain))
        assert taken == expected, name  # besides the context


def test_a_context_computes_its_own_form_of_a_primitive() -> None:
    class Doubling(StepContext):
        def lookup(self, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            return 2 * ops.lookup.plain(self, table, ids)

    Doubling.forms = ops.methods_as_forms(Doubling)
    table, ids = tf.constant([[1.0], [3.0]]), tf.constant([1])
    assert ops.lookup(StepContext(), table, ids).numpy().tolist() == [[3.0]]
    assert ops.lookup(Doubling(), table, ids).numpy().tolist() == [[6.0]]
    assert ops.lookup(Doubling().fold(1), table, ids).numpy().tolist() == [[6.0]]


def test_a_primitive_is_no_method_of_the_context() -> None:
    with pytest.raises(AttributeError, match=r"write ops\.project\(ctx, …\)"):
        StepContext().project(tf.ones([1, 2]), tf.ones([2, 2]))
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        StepContext().nothing  # noqa: B018


def test_the_context_stays_small() -> None:
    members = [name for name in {*dir(StepContext()), *vars(StepContext())} if name[0] != "_"]
    assert len(members) <= MOST_PUBLIC_MEMBERS, sorted(members)
