"""Rematerialize: in place of a layer, without a trace of itself; it computes the layer twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import foreign_variables
from tekso.framework.context import StepContext
from tekso.framework.coupling import sums_over_replicas
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.rematerialize import Rematerialize

B, D = 3, 5


class Root(Layer):
    """A model with one child."""

    class Params(Layer.Params):
        """Params of Root."""

    def __init__(self, params: Any, inner: Layer.Params) -> None:
        super().__init__(params)
        self.child("block", inner)


def build(inner: Layer.Params) -> Root:
    return Root.Params().instantiate(inner=inner)


def test_paths_first_values_and_streams_are_those_of_the_layer_alone() -> None:
    inner = FeedForward.Params(input_dim=D, hidden_dim=2)
    plain, wrapped = build(inner), build(Rematerialize.Params(layer=inner))

    assert wrapped.specs().keys() == plain.specs().keys()
    tf.nest.map_structure(np.testing.assert_array_equal, wrapped.init(3), plain.init(3))
    patterns = [{layer.pattern for layer in root.walk()} for root in (plain, wrapped)]
    assert patterns[0] == patterns[1]


def test_the_wrapped_layer_is_no_undeclared_one() -> None:
    inner = FeedForward.Params(input_dim=D, hidden_dim=2)
    foreign_variables.check(build(Rematerialize.Params(layer=inner)))
    root = build(inner)
    root.more = inner.instantiate()
    with pytest.raises(foreign_variables.ForeignVariableError, match="'more'"):
        foreign_variables.check(root)


def test_forward_is_computed_again_backward_from_the_input() -> None:
    calls = []

    class Counting(FeedForward):
        class Params(FeedForward.Params):
            """Params of Counting."""

        def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, factor: int) -> tf.Tensor:
            calls.append(x.shape)
            return factor * super().fprop(theta, x, ctx)

    layer = build(Rematerialize.Params(layer=Counting.Params(input_dim=D, hidden_dim=2)))
    theta, x = layer.init(), tf.ones([B, 2, D])

    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer.block.fprop(theta.block, x, StepContext(), factor=3)
        return tape.gradient(y, x)

    run(x)
    assert calls == [x.shape] * 2


class Coupling(FeedForward):
    """A layer that says that it couples examples, without batch statistics."""

    couples_examples = True


class Gathering(Coupling):
    """A layer that compares all examples by sums over replicas."""

    gathers_examples = True


@pytest.mark.parametrize(
    ("inner", "sums"),
    [
        (BatchNorm.Params(dim=D), True),
        (Gathering.Params(input_dim=D, hidden_dim=2), True),
        (Coupling.Params(input_dim=D, hidden_dim=2), False),
    ],
    ids=["statistics", "gathers", "couples"],
)
def test_a_wrapped_layer_sums_over_replicas_if_it_does_alone(
    inner: Layer.Params, sums: bool
) -> None:
    for layer in (build(inner).block, build(Rematerialize.Params(layer=inner)).block):
        assert layer.couples_examples
        assert sums_over_replicas(layer) == sums
        assert layer.gathers_examples == isinstance(inner, Gathering.Params)


def test_statistics_of_a_wrapped_batch_norm_reach_it_once() -> None:
    inner = BatchNorm.Params(dim=D)
    plain, wrapped = build(inner), build(Rematerialize.Params(layer=inner))
    assert wrapped.block.couples_examples
    x = tf.constant(np.random.default_rng(0).standard_normal([B, D]), tf.float32)

    def new(root: Root) -> dict[str, tf.Tensor]:
        theta, ctx = root.init(), StepContext(mode="train", num_examples=B)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = root.block.fprop(theta.block, x, ctx)
        tape.gradient(y, x)
        means = {k: value / w for k, (value, w) in ctx.collected.sums["statistic"].items()}
        flat = {f"block/{name}": value for name, value in theta.block.items()}
        return root.new_statistics(flat, means)

    got, want = new(wrapped), new(plain)

    assert got.keys() == want.keys() == {"block/moving_mean", "block/moving_variance"}
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
