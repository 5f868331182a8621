"""The LSTM's update against its formula and TensorFlow's own gradient of it, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion
from tekso.framework.primitives.recurrence import lstm_update


def formula(
    inputs: tf.Tensor, recurrent: tf.Tensor, memory: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    i, f, g, o = tf.unstack(inputs + recurrent, axis=1)
    after = tf.sigmoid(f + 0.5) * memory + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(after), after


@pytest.mark.parametrize("fuse", [no_fusion, XlaFusion()], ids=["plain", "compiled"])
@pytest.mark.parametrize("used", ["output", "memory", "both"])
def test_values_and_gradients_are_those_of_the_formula(fuse: Fuse, used: str) -> None:
    random = np.random.default_rng(0)
    args = [tf.constant(random.normal(size=shape)) for shape in ((3, 4, 5), (3, 4, 5), (3, 5))]
    found = []
    for compute in (lambda *a: lstm_update(*a, forget_bias=0.5, fuse=fuse), formula):
        with tf.GradientTape() as tape:
            tape.watch(args)
            output, memory = compute(*args)
            loss = 0.0
            if used != "memory":
                loss += tf.reduce_sum(tf.sin(output))
            if used != "output":
                loss += tf.reduce_sum(memory**3)
        found.append([output, memory, *tape.gradient(loss, args)])
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-14)
