"""Params: declaration of fields, their owners, and the types of their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from small_params import Init, Linear, Padding, Stack, Uniform, holding, message

from tekso.framework.params import Configurable, OldField, Params, param


def test_a_field_without_doc_is_an_error_at_class_creation() -> None:
    def declare() -> None:
        class Bad(Params):
            dim: int = 3

    assert 'dim: int = param("What it is."' in message(TypeError, declare)


def test_an_empty_doc_is_an_error() -> None:
    message(TypeError, lambda: param("  ", default=3))


def test_a_field_without_type_is_an_error() -> None:
    def declare() -> None:
        class Bad(Params):
            dim = param("Size.", default=3)

    assert "dim has no type" in message(TypeError, declare)


@pytest.mark.parametrize("value", [[], {}, 0.1, "relu", None])
def test_a_public_value_without_a_type_is_an_error_that_says_what_to_write(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"Mine\.sizes is no field, because it has no type"
    ) as error:
        type("Mine", (Params,), {"sizes": value})
    kind = type(value).__name__
    assert f'sizes: {kind} = param("What it is.", default={value!r})' in str(error.value)


def test_a_value_without_the_name_of_its_field_is_an_error_with_a_name() -> None:
    text = message(TypeError, lambda: Linear.Params(3))
    assert text == "Linear.Params takes the names of fields, as in Linear.Params(input_dim=3)"
    assert "(field=3)" in message(TypeError, lambda: Params(3))


def test_what_else_a_class_body_may_have_is_no_field() -> None:
    class Base(Params):
        shared: ClassVar[list[int]] = [1]
        old_fields = {"fast": OldField("set kernel")}  # noqa: RUF012
        _private = 3
        version = 1

        class Inner:
            """A class."""

        def method(self) -> int:
            return 1

        @property
        def double(self) -> int:
            return 2

    class Derived(Base):
        shared = [2]  # noqa: RUF012

    assert not Base().fields() and Derived.shared == [2]


def test_a_plain_value_that_hides_a_field_is_an_error() -> None:
    def declare() -> None:
        class Bad(Linear.Params):
            dropout = 0.5

    assert "param('Rate.', default=0.5)" in message(TypeError, declare)


def test_a_subclass_changes_a_default_and_keeps_the_type() -> None:
    class Half(Linear):
        class Params(Linear.Params):
            dropout = param("Rate.", default=0.5)

    assert Half.Params().dropout == 0.5
    assert Linear.Params().dropout == 0.0
    message(TypeError, lambda: Half.Params(dropout="x"))


@pytest.mark.parametrize("name", ["copy", "set", "visit", "owner"])
def test_a_field_cannot_take_the_name_of_a_method(name: str) -> None:
    namespace = {"__annotations__": {name: int}, name: param("It.", default=1)}
    assert name in message(AttributeError, lambda: type("Bad", (Params,), namespace))


def test_class_variables_are_no_fields() -> None:
    class WithConstant(Params):
        limit: ClassVar[int] = 3
        dim: int = param("Size.", default=2)

    assert list(WithConstant().fields()) == ["dim"]


def test_a_wrong_default_is_an_error_that_names_the_field() -> None:
    class Bad(Params):
        dim: int = param("Size.", default="3")

    text = message(TypeError, Bad)
    assert "Bad.dim must be int" in text and "'3'" in text


def test_types_may_be_local_to_a_function_and_name_their_own_owner() -> None:
    class Local(Configurable):
        class Params(Configurable.Params):
            size: int = param("Size.", default=2)

    class Tree(Configurable):
        class Params(Configurable.Params):
            leaf: Local.Params = param("Leaf.", default=Local.Params())
            below: Tree.Params | None = param("Subtree.", default=None)

    tree = Tree.Params(below=Tree.Params())
    assert tree.below.leaf.size == 2
    message(TypeError, lambda: tree.set(leaf=Tree.Params()))


def test_a_local_name_of_a_calling_function_does_not_hide_a_module_name() -> None:
    def declare() -> type[Params]:
        class Child(Params):
            init: Init.Params = param("Initializer.", default=Uniform.Params())

        return Child

    def call(Init: type) -> Params:
        return declare()()

    assert isinstance(call(int).init, Uniform.Params)


def test_a_type_that_cannot_be_resolved_names_the_field() -> None:
    class Bad(Params):
        dim: Missing = param("Size.", default=1)  # noqa: F821

    text = message(TypeError, Bad)
    assert "Bad.dim" in text and "Missing" in text and "TYPE_CHECKING" in text


def test_a_field_on_the_class_gives_its_documentation() -> None:
    field = Linear.Params.input_dim
    assert (field.name, field.doc, field.type) == (
        "input_dim",
        "Size of the last dim of the input.",
        int,
    )


# Owners.


def test_a_class_without_params_gets_its_own() -> None:
    class Plain(Linear):
        pass

    assert Plain.Params.owner is Plain and Linear.Params.owner is Linear
    assert isinstance(Plain.Params(input_dim=3).instantiate(), Plain)


def test_two_subclasses_share_nothing() -> None:
    class A(Stack):
        pass

    class B(Stack):
        pass

    a, b = A.Params(), B.Params()
    a.body.init.scale = 7.0
    a.layers.append(Linear.Params())
    assert A.Params is not B.Params
    assert b.body.init.scale == A.Params().body.init.scale == 0.5
    assert b.layers == A.Params().layers == []


def test_params_of_another_class_are_not_shared_by_an_alias() -> None:
    class Alias(Configurable):
        Params = Linear.Params

    assert Alias.Params.owner is Alias and Linear.Params.owner is Linear


def test_nested_params_have_to_derive_from_those_of_the_base() -> None:
    def declare() -> None:
        class Bad(Linear):
            class Params(Configurable.Params):
                pass

    assert "must derive from Linear.Params" in message(TypeError, declare)


def test_instantiate_freezes_a_copy_and_passes_keyword_arguments() -> None:
    class Layer(Configurable):
        def __init__(self, params: Any, *, name: str) -> None:
            super().__init__(params)
            self.name = name

    params = Layer.Params()
    layer = params.instantiate(name="x")
    assert layer.name == "x" and layer.params.is_frozen and not params.is_frozen
    assert layer.params.instantiate(name="y").params is layer.params


def test_required_is_an_error_at_instantiate_with_the_full_path() -> None:
    class Outer(Configurable):
        class Params(Configurable.Params):
            stack: Stack.Params = param("Stack.", default=Stack.Params())

        def __init__(self, params: Any) -> None:
            super().__init__(params)
            params.stack.named["a"].instantiate()

    params = Outer.Params(stack=Stack.Params(named={"a": Linear.Params()}))
    text = message(ValueError, params.instantiate)
    assert text.startswith("stack.named.a.input_dim is REQUIRED")
    assert "Size of the last dim of the input." in text


def test_a_copy_of_a_child_still_knows_where_it_came_from() -> None:
    frozen = Stack.Params().freeze()
    child = frozen.body.copy().set(dropout=0.5)
    assert "body.input_dim is REQUIRED" in message(ValueError, child.instantiate)


def test_required_may_be_set_before_instantiate() -> None:
    assert Linear.Params(input_dim=3).instantiate().params.input_dim == 3


# Types.


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [3, -1, 10**30], [True, 3.0, "3", None]),
        (float, [0.5, 3], [True, "0.5", None, 10**400]),
        (bool, [True, False], [1, 0, "0", "True", None]),
        (str, ["x", ""], [3, b"x", None]),
        (bytes, [b"x"], ["x"]),
        (None, [None], [0, False]),
        (Any, [None, 3, "x", [1]], []),
        (int | None, [3, None], [True, "x", 3.0]),
        (int | float, [3, 0.5], [True, "x"]),
        (float | None, [3, 0.5, None], [False]),
        (Literal["a", 3], ["a", 3], ["b", 3.0, True]),
        (Literal[1], [1], [True, 1.0]),
        (Padding, [Padding.SAME], ["SAME", "same"]),
        (list[int], [[], [1, 2]], [(1, 2), [True], ["x"], None, "12"]),
        (list[list[int]], [[[1], []]], [[1], [[True]]]),
        (tuple[int, ...], [(), (1, 2)], [[1], (True,)]),
        (tuple[int, str], [(1, "a")], [(1,), ("a", 1), (1, "a", 2)]),
        (tuple[()], [()], [(1,)]),
        (dict[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "b"}, []]),
        (Mapping[str, int], [{"a": 1}], [{"a": True}]),
        (set[int], [set(), {1}], [[1], {"a"}]),
        (frozenset[str], [frozenset({"a"})], [{"a"}]),
        (Sequence[int], [[1], (1, 2)], ["12", [True]]),
        (Callable[[int], str], [str, len], [3, None]),
        (type, [int, Linear], [3, "int"]),
        (type[Init], [Init, Uniform], [Linear, int]),
        (Init.Params, [Init.Params(), Uniform.Params()], [Linear.Params(), Init.Params, None, 3]),
        (Params, [Linear.Params()], [Linear, 3]),
        (Path, [Path("a")], ["a", Path]),
    ],
)
def test_values_are_checked_against_the_type(annotation: Any, good: list, bad: list) -> None:
    params = holding(annotation)
    for value in good:
        params.x = value
        assert params.x == value
    for value in bad:
        before = params.x
        text = message(TypeError, lambda value=value: params.set(x=value))
        assert text.startswith("x: must be ") and "given" in text
        assert params.x is before


def test_an_int_becomes_a_float_where_a_float_is_wanted() -> None:
    params = Linear.Params(dropout=1)
    assert type(params.dropout) is float
    assert [type(rate) for rate in holding(list[float], [1, 0.5]).x] == [float, float]
    assert type(holding(float | int, 1).x) is int


def test_numpy_scalars_become_those_of_python() -> None:
    params = Linear.Params(input_dim=np.int64(3), dropout=np.float32(0.5), use_bias=np.bool_(False))
    assert (type(params.input_dim), type(params.dropout), params.use_bias) == (int, float, False)
    message(TypeError, lambda: params.set(input_dim=np.bool_(True)))


def test_the_error_names_the_full_path_what_is_wanted_and_what_is_given() -> None:
    params = Stack.Params(layers=[Linear.Params(), Linear.Params()])
    text = message(TypeError, lambda: setattr(params.layers[1].init, "scale", "big"))
    assert text == "layers.1.init.scale: must be float, given str 'big'"
    text = message(TypeError, lambda: setattr(params, "dims", (2, True)))
    assert text.startswith("dims: must be tuple[int, ...], given tuple (2, True)")
    assert "item 1 is bool True" in text


def test_a_literal_suggests_a_close_choice() -> None:
    params = holding(Literal["train", "eval"], "train")
    assert "did you mean 'train'?" in message(TypeError, lambda: params.set(x="trian"))


def test_a_params_class_in_place_of_an_instance_is_explained() -> None:
    text = message(TypeError, lambda: Linear.Params(init=Uniform.Params))
    assert "given the class Uniform.Params" in text and "call it" in text


def test_an_error_can_show_an_int_of_thousands_of_digits() -> None:
    assert "given int 0x" in message(TypeError, lambda: Linear.Params(use_bias=10**5000))


def test_a_class_that_is_called_without_params_says_how_it_is_built() -> None:
    class Block(Configurable):
        class Params(Configurable.Params):
            dims: list[int] = param("Sizes.", default=[])
            name: str = param("Name.", default="")

    message = (
        r"^Block is built from its Params: write Block.Params\(dims=\[3\]\) for a field or a "
        r"child, and Block.Params\(dims=\[3\]\).instantiate\(\) for the object itself$"
    )
    with pytest.raises(TypeError, match=message):
        Block(dims=[3])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"write Block.Params\(name=…, …\) .*; the fields are dims"):
        Block(3, name="a" * 40)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"write Block.Params\(…\) .*; the fields are dims, name$"):
        Block(size=3)  # type: ignore[call-arg]
    made = Block(Block.Params(dims=[2]))
    assert copy.copy(made).params.dims == Block(params=made.params).params.dims == [2]


class Holder(Configurable):
    class Params(Configurable.Params):
        part: Linear.Params = param("A part.", default=Linear.Params())
        steps: int | None = param("Steps.", default=None)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Linear, r"given the class Linear \(write Linear.Params\(\)\)$"),
        (Linear.Params(input_dim=3).instantiate(), r"\(write Linear.Params\(\)\)$"),
        (Linear.Params, r"\(a class: call it to create an instance\)$"),
        ("linear", r"given str 'linear' \(did you mean Linear.Params\(\)\?\)$"),
        ("quadratic", "given str 'quadratic'$"),
        (Holder, r"given the class Holder$"),
    ],
)
def test_a_value_that_is_not_params_is_answered_with_params(value: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"^part: must be Linear.Params, .*{hint}"):
        Holder.Params(part=value)


def test_a_float_that_is_whole_is_answered_with_an_int() -> None:
    with pytest.raises(TypeError, match=r"given float 1000.0 \(write 1000\)$"):
        Holder.Params(steps=1e3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"given float 0.5$"):
        Holder.Params(steps=0.5)  # type: ignore[arg-type]
