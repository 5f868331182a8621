"""What to write instead, for common errors in layers."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import error_advice
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.models.layers.linear import Linear
from tekso.models.layers.stack import Stack


class Plain(Layer):
    """A layer whose fprop has no keyword arguments."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return x


@pytest.mark.parametrize("name", ["mask", "positions"])
def test_a_layer_of_a_stack_without_side_arguments_is_told_its_signature(name: str) -> None:
    stack = Stack.Params(num_layers=1, layer=Plain.Params()).instantiate()
    with pytest.raises(TypeError) as caught:
        stack.fprop(stack.init(seed=0), tf.ones([2, 3, 5]), StepContext(), **{name: None})
    assert "mask=None, positions=None)" in error_advice.text_of(caught.value)


def test_a_batch_in_float32_for_weights_in_bfloat16_is_told_to_cast_it() -> None:
    layer = Linear.Params(input_dim=3, output_dim=5).instantiate()
    theta = tf.nest.map_structure(lambda w: tf.cast(w, tf.bfloat16), layer.init(seed=0))
    with pytest.raises(Exception, match="bfloat16") as caught:
        layer.fprop(theta, tf.ones([2, 3]), StepContext())
    assert "x = tf.cast(x, theta.w.dtype)" in error_advice.text_of(caught.value)
