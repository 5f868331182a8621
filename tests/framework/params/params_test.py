"""Params: one place for every node, freezing, copies, comparison, origins."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from small_params import Init, Linear, Sets, Stack, line_here, message

from tekso.framework.params import (
    REQUIRED,
    FrozenParamsError,
    paths,
)


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


def test_similar_names_are_searched_for_only_if_a_message_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = Stack.Params()
    with pytest.raises(AttributeError) as caught:
        params.body.dropuot  # noqa: B018
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert str(error).endswith("; did you mean body.dropout?")
    monkeypatch.setattr(paths, "suggestion", None)
    assert "dropuot" not in params.body and "body.dropuot" not in params
    assert not hasattr(params.body, "dropuot")


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
