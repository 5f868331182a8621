"""Params: fields, types, dotted access, atomic set, freezing, copies, origins."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from tekso.framework.params import (
    REQUIRED,
    Configurable,
    FrozenParamsError,
    Params,
    param,
)


class Padding(enum.Enum):
    SAME = "same"
    VALID = "valid"


class Init(Configurable):
    class Params(Configurable.Params):
        """Params of Init."""

        scale: float = param("Factor.", default=1.0)


class Uniform(Init):
    class Params(Init.Params):
        """Params of Uniform."""

        low: float = param("Lower end.", default=-1.0)


class Linear(Configurable):
    class Params(Configurable.Params):
        """Params of Linear."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        use_bias: bool = param("Whether to add a bias.", default=True)
        dropout: float = param("Rate.", default=0.0)
        init: Init.Params = param("Initializer.", default=Uniform.Params(scale=0.5))


class Stack(Configurable):
    class Params(Configurable.Params):
        """Params of Stack."""

        body: Linear.Params = param("One layer.", default=Linear.Params())
        layers: list[Linear.Params] = param("More layers.", default=[])
        named: dict[str, Linear.Params] = param("Layers by name.", default={})
        dims: tuple[int, ...] = param("Sizes.", default=(2, 3))
        below: Stack.Params | None = param("A stack below.", default=None)


class Sets(Configurable):
    class Params(Configurable.Params):
        """Params of Sets."""

        nested: dict[str, list[Any]] = param("Containers.", default={"a": [{1}]})


def holding(annotation: Any, default: Any = REQUIRED) -> Any:
    """Params with one field, x, of the type."""
    namespace = {"__annotations__": {"x": annotation}, "x": param("The value.", default=default)}
    return type("Holder", (Params,), namespace)()


def message(error_type: type[BaseException], act: Callable[[], Any]) -> str:
    with pytest.raises(error_type) as caught:
        act()
    return str(caught.value)


def line_here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


# Declaration.


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


# Unknown names.


def test_an_error_can_show_an_int_of_thousands_of_digits() -> None:
    assert "given int 0x" in message(TypeError, lambda: Linear.Params(use_bias=10**5000))


def test_unknown_attributes_are_errors_for_reading_and_setting() -> None:
    params = Linear.Params()
    for act in (lambda: params.dropuot, lambda: setattr(params, "dropuot", 0.1)):
        assert "has no field dropuot; did you mean dropout?" in message(AttributeError, act)
    assert "inputdim" in message(AttributeError, lambda: Linear.Params(inputdim=3))
    message(AttributeError, lambda: delattr(params, "dropout"))


def test_a_typo_at_depth_is_reported_with_the_full_path_at_its_level() -> None:
    params = Stack.Params(below=Stack.Params())
    text = message(AttributeError, lambda: params.set({"below.body.inti.scale": 1.0}))
    assert text == (
        "Linear.Params has no field below.body.inti; "
        "did you mean below.body.init or below.body.input_dim?"
    )
    text = message(AttributeError, lambda: params.set({"below.body.init.scael": 1.0}))
    assert "below.body.init.scael; did you mean below.body.init.scale?" in text
    text = message(AttributeError, lambda: params.get("belwo.body.init.scale"))
    assert "has no field belwo; did you mean below?" in text


def test_a_typo_in_a_child_reached_by_attribute_has_the_full_path() -> None:
    params = Stack.Params(named={"dev": Linear.Params()})
    text = message(AttributeError, lambda: params.named["dev"].set(**{"init.scal": 1}))
    assert "named.dev.init.scal" in text and "named.dev.init.scale" in text


def test_a_field_at_the_wrong_level_is_found_below() -> None:
    text = message(AttributeError, lambda: Stack.Params().set(scale=3.0))
    assert "did you mean body.init.scale?" in text


def test_a_name_found_several_times_below_is_offered_in_full_and_as_a_wildcard() -> None:
    params = Stack.Params(layers=[Linear.Params()], below=Stack.Params())
    text = message(AttributeError, lambda: params.set(dropout=0.5))
    assert text.endswith(
        "did you mean body.dropout or layers.0.dropout or below.body.dropout, or *.dropout for "
        "all 3?"
    )
    params.set({"*.dropout": 0.5})
    assert params.body.dropout == params.layers[0].dropout == params.below.body.dropout == 0.5
    text = message(AttributeError, lambda: params.set({"below.use_bias": False}))
    assert text.endswith("did you mean below.body.use_bias?")


def test_a_typo_in_a_name_that_is_further_below_is_found() -> None:
    text = message(AttributeError, lambda: Stack.Params().set(dropuot=0.5))
    assert text.endswith("did you mean body.dropout?")


def test_without_a_close_match_the_fields_are_listed() -> None:
    text = message(AttributeError, lambda: Linear.Params().get("zzz"))
    assert "it has: input_dim, use_bias, dropout, init" in text


def test_a_path_through_a_leaf_says_so() -> None:
    text = message(AttributeError, lambda: Stack.Params().set({"below.dims": (1,)}))
    assert "below is None" in text
    text = message(AttributeError, lambda: Linear.Params().get("dropout.rate"))
    assert "dropout is float 0.0" in text


def test_items_of_containers_are_addressed_by_index_and_key() -> None:
    params = Stack.Params(
        layers=[Linear.Params(), Linear.Params()],
        named={"dev": Linear.Params(), "a.b": Linear.Params()},
    )
    params.set({"layers.1.dropout": 0.5, "named.dev.dropout": 0.25, "dims.0": 7})
    params.set({'named["a.b"].dropout': 0.125})
    assert params.get("layers.1.dropout") == params.get("layers.-1.dropout") == 0.5
    assert params.named["dev"].dropout == 0.25
    assert params.named["a.b"].dropout == 0.125
    assert params.dims == (7, 3)
    text = message(AttributeError, lambda: params.get("layers.2.dropout"))
    assert "layers has no item 2" in text and "0, 1" in text
    text = message(AttributeError, lambda: params.set({"named.dve.dropout": 0.5}))
    assert "did you mean named.dev?" in text
    message(TypeError, lambda: params.set({"dims.0": True}))


@pytest.mark.parametrize("path", ["", ".", "a..b", ".dropout", "dropout.", "named[dev]", "a[1"])
def test_text_that_is_no_path_is_an_error(path: str) -> None:
    with pytest.raises((ValueError, AttributeError)):
        Stack.Params().get(path)


def test_a_path_that_is_no_text_is_an_error_that_shows_it() -> None:
    wrong: Any = {3: 0.5}
    text = message(TypeError, lambda: Stack.Params().set(wrong))
    assert text == "a path of Params is a str, such as 'run.steps', given 3"


# Setting many.


def test_set_is_atomic_and_keeps_children() -> None:
    params = Stack.Params(layers=[Linear.Params()], named={"a": Linear.Params()})
    before, text = params.copy(), params.to_text()
    body, layer, layers = params.body, params.layers[0], params.layers
    for bad in ({"body.drop": 0.1}, {"body.dropout": "x"}, {"*.nothing": 1}, {"layers.9": 1}):
        changes = {
            "body.dropout": 0.5,
            "layers.0.use_bias": False,
            "named.a": Linear.Params(input_dim=5),
            "named.a.dropout": 0.75,
            "layers": [],
            "body": Linear.Params(input_dim=4),
            "body.init": Init.Params(),
            "dims.1": 9,
            **bad,
        }
        message((AttributeError, TypeError), lambda changes=changes: params.set(changes))
        assert params == before and params.to_text() == text
        assert params.body is body and params.layers is layers and params.layers[0] is layer
        assert params.origin("body.dropout") == "default"
        assert "body.input_dim" in message(ValueError, params.body.instantiate)


def test_a_failed_set_gives_a_new_child_back_unattached() -> None:
    params, child = Stack.Params(), Linear.Params()
    message(TypeError, lambda: params.set(body=child, dims=3))
    params.body = child
    assert params.body is child  # not a copy: it had no place in a tree


def test_set_takes_a_mapping_and_keywords_and_returns_self() -> None:
    params = Stack.Params()
    assert params.set({"body.dropout": 0.5}, dims=(4,)) is params
    assert (params.body.dropout, params.dims) == (0.5, (4,))


def test_a_later_path_may_lie_in_a_child_that_an_earlier_one_sets() -> None:
    params = Stack.Params().set({"below": Stack.Params(), "below.body.dropout": 0.5})
    assert params.below.body.dropout == 0.5


def test_a_wildcard_sets_everything_that_it_hits() -> None:
    params = Stack.Params(layers=[Linear.Params(), Linear.Params()], below=Stack.Params())
    params.set({"*.dropout": 0.5})
    hits = ["body", "layers.0", "layers.1", "below.body"]
    assert [params.get(f"{hit}.dropout") for hit in hits] == [0.5] * 4
    params.set({"layers.?.dropout": 0.25, "b*y.dropout": 0.75})
    assert [params.get(f"{hit}.dropout") for hit in hits] == [0.75, 0.25, 0.25, 0.75]


def test_a_wildcard_gives_every_hit_a_child_of_its_own() -> None:
    params = Stack.Params(layers=[Linear.Params(), Linear.Params()])
    params.set({"layers.*.init": Init.Params(scale=3.0)})
    first, second = params.layers
    first.init.scale = 4.0
    assert second.init.scale == 3.0


def test_a_wildcard_that_hits_nothing_names_close_matches() -> None:
    params = Stack.Params(layers=[Linear.Params()])
    text = message(AttributeError, lambda: params.set({"*.dropuot": 0.5}))
    assert "'*.dropuot' matches no field" in text
    assert "did you mean body.dropout or layers.0.dropout?" in text


def test_a_wildcard_with_one_wrong_type_changes_nothing() -> None:
    params = Stack.Params()
    message(TypeError, lambda: params.set({"body.*": 0.5}))
    assert params == Stack.Params()


# A tree: one place for every node.


def test_assigning_a_child_that_has_a_place_stores_a_copy() -> None:
    params = Stack.Params()
    params.below = Stack.Params()
    params.below.body = params.body
    params.body.dropout = 0.5
    assert params.below.body.dropout == 0.0
    shared = Linear.Params()
    params.layers = [shared, shared]
    params.layers[0].dropout = 0.5
    assert params.layers[1].dropout == 0.0


def test_assigning_a_child_to_its_own_place_keeps_it() -> None:
    params = Stack.Params(layers=[Linear.Params(), Linear.Params()])
    body, layers = params.body, list(params.layers)
    params.body = params.body
    params.layers = params.layers[::-1]
    assert params.body is body
    assert [params.layers[0] is layers[1], params.layers[1] is layers[0]] == [True, True]


def test_params_cannot_contain_themselves() -> None:
    params = Stack.Params()
    assert "cannot contain themselves" in message(ValueError, lambda: params.set(below=params))
    params.below = Stack.Params()
    message(ValueError, lambda: setattr(params.below, "below", params))


def test_a_container_is_copied_when_it_is_set() -> None:
    mine = [Linear.Params()]
    params = Stack.Params(layers=mine)
    mine.append("not Params")
    assert len(params.layers) == 1


def test_a_copy_shares_no_node_and_keeps_origins() -> None:
    params = Stack.Params(layers=[Linear.Params()], named={"a": Linear.Params()})
    params.body.dropout = 0.5
    twin = params.copy()
    assert twin == params and twin.origin("body.dropout") == params.origin("body.dropout")
    twin.body.init.scale = 9.0
    twin.layers[0].dropout = 0.75
    twin.named["a"].dropout = 0.75
    twin.layers.append(Linear.Params())
    assert params.body.init.scale == 0.5 and len(params.layers) == 1
    assert params.layers[0].dropout == params.named["a"].dropout == 0.0


def test_the_copy_module_and_pickle_work() -> None:
    params = Stack.Params(layers=[Linear.Params(input_dim=3)])
    assert copy.deepcopy(params) == copy.copy(params) == params
    frozen = pickle.loads(pickle.dumps(params.freeze()))
    assert frozen == params and frozen.is_frozen and frozen.layers[0].is_frozen
    assert pickle.loads(pickle.dumps(Linear.Params())).input_dim is REQUIRED


# Freezing.


def test_freezing_is_deep() -> None:
    params = Stack.Params(
        layers=[Linear.Params()], named={"a": Linear.Params()}, below=Stack.Params()
    )
    sets = Sets.Params().freeze()
    assert params.freeze() is params and params.is_frozen
    for act in (
        lambda: setattr(params, "dims", (1,)),
        lambda: params.set({"body.init.scale": 1.0}),
        lambda: params.set({"*.scale": 1.0}),
        lambda: params.set_text("dims", "1"),
        lambda: params.layers.append(Linear.Params()),
        lambda: params.layers.__setitem__(0, Linear.Params()),
        lambda: params.layers[0].set(dropout=0.5),
        lambda: params.named.update(b=Linear.Params()),
        lambda: params.named.pop("a"),
        lambda: params.below.body.set(dropout=0.5),
        lambda: sets.nested["a"].sort(),
        lambda: sets.nested["a"][0].add(2),
    ):
        message(FrozenParamsError, act)
    text = message(FrozenParamsError, lambda: setattr(params.below.body, "dropout", 0.5))
    assert "cannot set below.body.dropout" in text and "copy()" in text


def test_a_tree_with_a_frozen_child_can_be_frozen() -> None:
    params = Stack.Params(below=Stack.Params(layers=[Linear.Params()]))
    params.below.freeze()
    assert params.freeze().below.layers[0].is_frozen
    assert not params.copy().below.is_frozen


def test_a_copy_of_frozen_params_can_be_changed() -> None:
    params = Stack.Params(layers=[Linear.Params()]).freeze().copy()
    params.layers.append(Linear.Params())
    params.layers[0].dropout = 0.5
    params.dims = (1,)
    assert type(params.layers) is list and not params.layers[0].is_frozen


def test_a_frozen_child_is_copied_into_a_tree() -> None:
    child = Linear.Params().freeze()
    params = Stack.Params(body=child)
    params.body.dropout = 0.5
    assert child.dropout == 0.0


def test_what_was_put_into_a_container_is_checked_when_it_is_frozen() -> None:
    params = Stack.Params()
    params.layers.append("not Params")
    assert "layers: must be list[Linear.Params]" in message(TypeError, params.freeze)
    assert not params.is_frozen and not params.body.is_frozen
    params.layers[:] = [Linear.Params()]
    text = message(FrozenParamsError, lambda: params.freeze().layers[0].set(dropout=0.5))
    assert "layers.0.dropout" in text


def calls_to_build_copy_and_freeze(size: int) -> int:
    """Function calls, Python's own among them, for a tree of 2 * size nodes."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        params = Stack.Params(
            layers=[Linear.Params(input_dim=3) for _ in range(size // 5)],
            named={f"n{i}": Linear.Params() for i in range(size - size // 5)},
        )
        params.copy().instantiate()
    finally:
        sys.setprofile(before)
    return calls


def test_the_work_of_building_copying_and_freezing_grows_as_the_tree() -> None:
    calls_to_build_copy_and_freeze(5)  # types and templates are made at first use
    small, large = (calls_to_build_copy_and_freeze(size) for size in (250, 1000))
    assert large < 4.1 * small
    assert large < 80 * 2 * 1000  # 61 a node with Python 3.11


# Visiting, comparing.


def test_visit_sees_every_leaf_in_order() -> None:
    params = Stack.Params(layers=[Linear.Params()], named={"a.b": Linear.Params(input_dim=3)})
    seen: list[tuple[str, Any, str]] = []
    params.visit(lambda path, value, field: seen.append((path, value, field.name)))
    paths = [path for path, _, _ in seen]
    linear = ["input_dim", "use_bias", "dropout", "init.scale", "init.low"]
    assert paths == [
        *(f"body.{name}" for name in linear),
        *(f"layers.0.{name}" for name in linear),
        *(f'named["a.b"].{name}' for name in linear),
        "dims",
        "below",
    ]
    assert ('named["a.b"].input_dim', 3, "input_dim") in seen
    assert all(params.get(path) is value for path, value, _ in seen)


def test_equality_knows_types() -> None:
    def made(value: Any) -> Sets.Params:
        return Sets.Params(nested={"x": [value]})

    for a, b in [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ("a", b"a"), ({1}, {True})]:
        assert made(a) != made(b)
    for same in (float("nan"), [float("nan")], {"a": (1, None)}, Path("a")):
        assert made(same) == made(same)
    assert Linear.Params() != Stack.Params()
    assert made(float("nan")) == made(-float("nan"))


def test_diff_gives_a_line_a_difference() -> None:
    old = Stack.Params(layers=[Linear.Params(), Linear.Params()])
    new = old.copy()
    assert old.diff(new) == ""
    line = line_here() + 1
    new.set({"layers.1.dropout": 1, "dims": (5,)})
    new.set_text("body.init.scale", "2")
    where = f"params_test.py:{line}"
    lines = old.diff(new).splitlines()
    assert lines[0] == "body.init.scale : 0.5 -> 2.0  # --set"
    assert lines[1].startswith("layers.1.dropout : 0.0 -> 1.0  # ") and lines[1].endswith(where)
    assert lines[2].startswith("dims : (2, 3) -> (5,)  # ")
    assert len(lines) == 3


def test_diff_of_other_classes_and_fields() -> None:
    old, new = Linear.Params(), Linear.Params(init=Init.Params())
    text = old.diff(new)
    assert 'Uniform") -> Params(' in text
    assert "init.low : -1.0 -> (no field)" in text
    assert "init.low : (no field) -> -1.0" in new.diff(old)


# Origins.


def test_every_value_knows_where_it_was_set() -> None:
    line = line_here() + 1
    params = Stack.Params(body=Linear.Params(dropout=0.5), layers=[Linear.Params()])
    params.body.init.scale = 3.0
    params.set(
        {"layers.0.dropout": 0.5},
    )
    params.set_text("dims", "4,5")
    params.set_text("layers.0.use_bias", "false", origin="checkpoint")

    def here(offset: int) -> str:
        return f"params_test.py:{line + offset}"

    assert params.origin("body").endswith(here(0))
    assert params.origin("body.dropout").endswith(here(0))
    assert params.origin("body.init.scale").endswith(here(1))
    assert params.origin("layers.0.dropout").endswith(here(2))
    assert params.origin("dims") == "--set"
    assert params.origin("layers.0.use_bias") == "checkpoint"
    assert params.origin("body.use_bias") == "default"
    assert params.origin("body.init") == "default"


def test_what_a_default_sets_in_a_child_is_default() -> None:
    assert Linear.Params().init.scale == 0.5  # set in the class body, to Uniform
    assert Linear.Params().origin("init.scale") == "default"


def test_a_file_below_the_working_directory_is_named_relative_to_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    params = Linear.Params()
    code = compile("\nparams.dropout = 0.5", str(tmp_path / "their" / "code.py"), "exec")
    exec(code, {"params": params})
    assert params.origin("dropout") == "their/code.py:2"


def test_repr_shows_what_is_not_default() -> None:
    assert repr(Linear.Params(input_dim=3)) == "Linear.Params(input_dim=3, init=Uniform.Params())"


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


def test_a_method_of_the_owner_is_no_field_of_its_params() -> None:
    class Doubling(Configurable):
        def fprop(self, x: int) -> int:
            return 2 * x

    message = (
        r"Doubling.Params has no field fprop: it is a method of Doubling, .* "
        r"self.child\(name, params\), or build it by params.instantiate\(\)$"
    )
    with pytest.raises(AttributeError, match=message):
        Doubling.Params().fprop(3)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no field fprop; it has no fields$"):
        Doubling.Params(fprop=3)  # type: ignore[call-arg]
