"""Pieces pick their weights out of a model's, by whole path parts."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tekso.framework.layer import Layer
from tekso.framework.pieces import Piece
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear


def piece(**layers: Layer) -> Piece:
    named = {name.replace("__", "/"): layer for name, layer in layers.items()}
    return Piece("some", named, lambda theta, flow, ctx: flow)


def test_a_piece_owns_what_lies_below_its_layers() -> None:
    one = piece(stack__layers__1=Linear.Params(input_dim=2, output_dim=3).instantiate())

    assert one.owns("stack/layers/1/w")
    assert not one.owns("stack/layers/11/w")
    assert not one.owns("stack/layers/1")


def test_theta_of_a_piece_has_a_place_for_every_child_of_its_layers() -> None:
    linear = Linear.Params(input_dim=2, output_dim=3).instantiate()
    feed = FeedForward.Params(input_dim=2, hidden_dim=3).instantiate()
    both = piece(a__b=linear, a__c=feed, d=Dropout.Params().instantiate())
    flat = {f"a/b/{name}": name for name in linear.specs()}
    flat |= {f"a/c/{name}": name for name in feed.specs()}

    theta = both.theta({**flat, "other/w": "not mine"})

    assert theta.a.b == {"w": "w", "b": "b"}
    assert theta.a.c.hidden.w == "hidden/w"
    assert theta.a.c.dropout == theta.d == {}
    assert "other" not in theta


def test_a_missing_weight_is_named() -> None:
    linear = Linear.Params(input_dim=2, output_dim=3).instantiate()
    with pytest.raises(KeyError, match="b"):
        piece(a=linear).theta({"a/w": 1})


def test_a_piece_that_is_all_of_a_model_is_found_below_a_task() -> None:
    model = Linear.Params(input_dim=2, output_dim=3).instantiate()
    whole = Piece("all", {"": model}, lambda theta, flow, ctx: {"y": theta.w}, kind="all")
    below = whole.below("model")
    assert (below.name, list(below.layers), below.kind) == ("model/all", ["model"], "model/all")
    w = tf.ones([2, 3])
    theta = below.theta({"model/w": w, "model/b": tf.zeros([3])})
    assert below.run(theta, {}, None)["y"] is w
