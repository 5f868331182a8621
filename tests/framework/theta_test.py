"""Theta: attribute access, the flat form, and how TensorFlow sees it."""

from __future__ import annotations

import copy
import pickle

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework import theta as theta_lib
from tekso.framework.theta import Theta

NAMES = st.text("abwxyz", min_size=1, max_size=3)
TREES = st.recursive(
    st.dictionaries(NAMES, st.integers(), min_size=1, max_size=3),
    lambda below: st.dictionaries(NAMES, below | st.integers(), min_size=1, max_size=3),
    max_leaves=12,
)


def as_theta(tree: dict[str, object]) -> Theta:
    return Theta((k, as_theta(v) if isinstance(v, dict) else v) for k, v in tree.items())


def test_attribute_is_the_item() -> None:
    theta = as_theta({"ffn": {"w": 1}, "b": 2})
    assert theta.ffn.w == theta["ffn"]["w"] == 1
    assert theta.b == 2


def test_a_missing_name_suggests_one_in_another_case() -> None:
    with pytest.raises(
        AttributeError, match=r"theta has no 'W', only \['b', 'w'\]; did you mean 'w'"
    ):
        _ = as_theta({"w": 1, "b": 2}).W


def test_layers_of_a_list_are_found_by_number() -> None:
    theta = as_theta({"blocks": {str(i): {"w": i} for i in range(11)}})
    assert theta.blocks[10] is theta.blocks["10"]
    with pytest.raises(KeyError, match=r"theta has no 11, only \['0', '1', '10', "):
        _ = theta.blocks[11]
    for key in (-1, 0.0, None):
        with pytest.raises(KeyError):
            _ = theta.blocks[key]  # type: ignore[index]


def test_missing_name_lists_the_names_and_the_close_one() -> None:
    theta = as_theta({"scale": 1, "bias": 2})
    with pytest.raises(AttributeError, match=r"no 'scael'.*\['bias', 'scale'\].*mean 'scale'"):
        _ = theta.scael
    with pytest.raises(AttributeError, match=r"only \['bias', 'scale'\]$"):
        _ = theta.xyz


def test_attributes_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="'w' cannot be set"):
        Theta(w=1).w = 2


def test_is_copied_and_pickled_as_a_mapping() -> None:
    theta = as_theta({"ffn": {"w": 1}, "b": 2})
    for again in (copy.deepcopy(theta), pickle.loads(pickle.dumps(theta))):
        assert isinstance(again.ffn, Theta)
        assert again == theta


@given(tree=TREES)
@settings(max_examples=50)
def test_flat_form_and_back_gives_the_same_tree(tree: dict[str, object]) -> None:
    theta = as_theta(tree)
    flat = theta_lib.flatten(theta)
    assert not any(isinstance(v, dict) for v in flat.values())
    again = theta_lib.unflatten(flat)
    assert again == theta
    assert isinstance(again, Theta)


def test_flat_form_has_paths_in_the_order_of_the_tree() -> None:
    theta = as_theta({"z": {"w": 1, "b": 2}, "a": 3})
    assert list(theta_lib.flatten(theta).items()) == [("z/w", 1), ("z/b", 2), ("a", 3)]
    assert list(theta_lib.flatten(theta, "model")) == ["model/z/w", "model/z/b", "model/a"]


def test_map_leaves_keeps_the_tree() -> None:
    theta = as_theta({"ffn": {"w": 1, "empty": {}}, "b": 2})
    doubled = theta_lib.map_leaves(lambda x: 2 * x, theta)
    assert doubled == {"ffn": {"w": 2, "empty": {}}, "b": 4}
    assert isinstance(doubled.ffn.empty, Theta)


def test_tensorflow_nests_functions_and_gradients_keep_the_type() -> None:
    theta = Theta(ffn=Theta(w=tf.constant(3.0)), b=tf.constant(2.0))
    mapped = tf.nest.map_structure(lambda x: x + 1, theta)
    assert isinstance(mapped.ffn, Theta)

    @tf.function(autograph=False)
    def gradient(theta: Theta) -> Theta:
        with tf.GradientTape() as tape:
            tape.watch(theta)
            y = theta.ffn.w * theta.ffn.w * theta.b
        return tape.gradient(y, theta)

    found = gradient(theta)
    assert (float(found.ffn.w), float(found.b)) == (12.0, 9.0)
