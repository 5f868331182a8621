"""The elementwise part of an LSTM's step, with a gradient that recomputes the activations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion


def lstm_update(
    inputs: tf.Tensor,
    recurrent: tf.Tensor,
    memory: tf.Tensor,
    *,
    forget_bias: float,
    fuse: Fuse = no_fusion,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the output and the next memory; see `ops.lstm_update`.

    The backward pass saves the sum of both products and the memories, and recomputes the
    activations from them.
    """

    @custom_gradient
    def run(inputs: tf.Tensor, recurrent: tf.Tensor, memory: tf.Tensor) -> Any:
        output, after, gates = fuse(_forward, forget_bias=forget_bias)(inputs, recurrent, memory)

        def grad(doutput: tf.Tensor, dafter: tf.Tensor) -> list[tf.Tensor]:
            backward = fuse(_backward, forget_bias=forget_bias)
            dgates, dmemory = backward(gates, memory, after, doutput, dafter)
            return [dgates, dgates, dmemory]

        return (output, after), grad

    output, after = run(inputs, recurrent, memory)
    return output, after


def _activated(gates: tf.Tensor, forget_bias: float) -> list[tf.Tensor]:
    i, f, g, o = tf.unstack(gates, axis=1)
    return [tf.sigmoid(i), tf.sigmoid(f + forget_bias), tf.tanh(g), tf.sigmoid(o)]


def _forward(
    inputs: tf.Tensor, recurrent: tf.Tensor, memory: tf.Tensor, *, forget_bias: float
) -> Any:
    gates = inputs + recurrent
    i, f, g, o = _activated(gates, forget_bias)
    after = f * memory + i * g
    return o * tf.tanh(after), after, gates


def _backward(
    gates: tf.Tensor,
    memory: tf.Tensor,
    after: tf.Tensor,
    doutput: tf.Tensor,
    dafter: tf.Tensor,
    *,
    forget_bias: float,
) -> Any:
    i, f, g, o = _activated(gates, forget_bias)
    top = tf.tanh(after)
    dmemory = dafter + doutput * o * (1 - top * top)
    dgates = [
        dmemory * g * i * (1 - i),
        dmemory * memory * f * (1 - f),
        dmemory * i * (1 - g * g),
        doutput * top * o * (1 - o),
    ]
    return tf.stack(dgates, 1), dmemory * f
