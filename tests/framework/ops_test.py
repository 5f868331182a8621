"""Every primitive is found in one table, and somebody has decided what it does on a mesh."""

from __future__ import annotations

import inspect

import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.execution.mesh import forms

MOST_PUBLIC_MEMBERS = 14


def test_each_primitive_has_a_form_on_a_mesh_or_is_declared_to_need_none() -> None:
    assert not forms.PROPAGATED & forms.FORMS.keys()
    assert forms.PROPAGATED | forms.FORMS.keys() == ops.PRIMITIVES.keys()


def test_forms_on_a_mesh_take_what_the_primitive_takes() -> None:
    for name, form in forms.FORMS.items():
        own = inspect.signature(form).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in own):
            continue  # hands all on
        plain = inspect.signature(ops.PRIMITIVES[name]).parameters
        taken = {p.name: (p.kind, p.default) for p in own}
        assert taken == {n: (p.kind, p.default) for n, p in plain.items()}, name


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
