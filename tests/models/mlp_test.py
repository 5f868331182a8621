"""The multilayer perceptron: its layers have dropout masks of their own."""

from __future__ import annotations

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.draws import Repeats
from tekso.models.mlp import Mlp


def test_hidden_layers_have_different_dropout_masks() -> None:
    params = Mlp.Params(input_dim=3, hidden_dims=[40, 40], output_dim=2, dropout_rate=0.5)
    mlp, ctx = params.instantiate(), StepContext(mode="train", num_examples=4)
    ctx.collected.repeats = Repeats()
    mlp.fprop(mlp.init(seed=0), tf.ones([4, 3]), ctx)
    assert len(ctx.collected.draws) == 2
    assert ctx.collected.repeats.warnings() == []
