"""Params: unknown names, paths, and setting many values at once or none."""

from __future__ import annotations

from typing import Any

import pytest
from small_params import Init, Linear, Stack, message

from tekso.framework.params import (
    Configurable,
)


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
        "below.body (Linear.Params) has no field inti; "
        "did you mean below.body.init or below.body.input_dim?"
    )
    text = message(AttributeError, lambda: params.set({"below.body.init.scael": 1.0}))
    assert (
        "below.body.init (Uniform.Params) has no field scael; did you mean below.body.init.scale?"
        in text
    )
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
