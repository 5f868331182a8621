"""Pieces pick their weights out of a model's, by whole path parts."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.layer import Layer
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, run_all
from tekso.framework.theta import Theta
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


def notes_of(name: str, layers: dict[str, Layer], run: Any, flow: Flow) -> list[str]:
    flat = {path: 0 for path in Linear.Params(input_dim=2, output_dim=3).instantiate().specs()}
    weights = {f"blocks/{i}/{path}": value for i in range(2) for path, value in flat.items()}
    with pytest.raises((AttributeError, KeyError)) as caught:
        run_all([Piece(name, layers, run)], weights, flow, StepContext())
    return caught.value.__notes__


def test_a_weight_that_a_piece_does_not_have_is_an_error_with_the_piece_and_its_layers() -> None:
    block = {"blocks/0": Linear.Params(input_dim=2, output_dim=3).instantiate()}

    assert notes_of("blocks/0", block, lambda theta, flow, ctx: theta.blocks[1], {}) == [
        "in the piece 'blocks/0', whose theta has the weights of its layers: blocks/0. A lambda in "
        "a loop sees the last i: use functools.partial(run, i)"
    ]

    def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "y": theta.head.w}

    assert notes_of("head", block, run, {}) == [
        "in the piece 'head', whose theta has the weights of its layers: blocks/0. List all layers "
        "that it reads: Piece(name, {path: layer}, run)"
    ]


def test_an_input_that_a_piece_does_not_have_is_an_error_with_its_inputs() -> None:
    def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "y": flow["weights"]}

    assert notes_of("loss", {}, run, {"x": 1, "h": 2}) == [
        "in the piece 'loss', whose inputs are h, x"
    ]


def test_a_piece_may_change_the_dict_that_it_gets() -> None:
    def first(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        flow["x"] = flow["x"] + 1
        flow["y"] = 2 * flow["x"]
        return flow

    def last(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        flow[LOSS_SUM], flow[METRICS] = tf.reduce_sum(flow["y"]), {}
        return flow

    pieces = [Piece("first", {}, first), Piece("last", {}, last)]
    given = {"x": tf.ones([2, 3])}

    assert run_all(pieces, {}, given, StepContext())[LOSS_SUM] == 24
    assert list(given) == ["x"]
    traces = trace_all(pieces, {}, {"x": ((2, 3), "float32")})
    assert [sorted(trace.reads) for trace in traces] == [["x"], ["y"]]
    assert [sorted(trace.writes) for trace in traces] == [["x", "y"], [LOSS_SUM, METRICS]]


@pytest.mark.parametrize("result", [{"y": 1, "z": 2}, None])
def test_a_piece_that_drops_values_is_refused_by_name(result: Any) -> None:
    def run(theta: Theta, flow: Flow, ctx: StepContext) -> Any:
        return result

    pieces, given = [Piece("first", {}, run)], {"x": tf.ones([2, 3]), "weights": tf.ones([2])}
    signature = {"x": ((2, 3), "float32"), "weights": ((2,), "float32")}
    for call in (
        lambda: run_all(pieces, {}, given, StepContext()),
        lambda: trace_all(pieces, {}, signature),
    ):
        with pytest.raises(
            ValueError, match=r"^the piece 'first' \(.*:\d+\) does not return weights, x: return"
        ):
            call()
