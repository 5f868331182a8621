"""Dropout as a layer: its rate, and masks that differ between layers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout


class Two(Layer):
    def __init__(self, params: Layer.Params) -> None:
        super().__init__(params)
        self.child("first", Dropout.Params(rate=0.5))
        self.child("second", Dropout.Params(rate=0.5))


def test_drops_in_training_only() -> None:
    layer = Dropout.Params(rate=0.2).instantiate()
    x = tf.ones([50, 40])
    assert layer.fprop(Theta(), x, StepContext(mode="eval")) is x
    y = layer.fprop(Theta(), x, StepContext(mode="train")).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1.25)}
    assert abs((y == 0).mean() - 0.2) < 5 * np.sqrt(0.16 / 2000)


def test_layers_draw_different_masks() -> None:
    two = Two.Params().instantiate()
    ctx = StepContext(mode="train")
    x = tf.ones([20, 20])
    a, b = (layer.fprop(Theta(), x, ctx) for layer in (two.first, two.second))
    assert 0.4 < float(tf.reduce_mean(tf.cast(a == b, tf.float32))) < 0.6


def test_has_no_weights_and_rate_0_by_default() -> None:
    layer = Dropout.Params().instantiate()
    assert layer.specs() == {}
    x = tf.ones([2])
    assert layer.fprop(Theta(), x, StepContext(mode="train")) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_that_is_no_probability_is_refused_when_built(rate: float) -> None:
    with pytest.raises(ValueError, match=r"not in \[0, 1\)"):
        Dropout.Params(rate=rate).instantiate()
