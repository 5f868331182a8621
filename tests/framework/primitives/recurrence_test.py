"""The LSTM's update against its formula and TensorFlow's own gradient of it, in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion
from tekso.framework.primitives.recurrence import lstm, lstm_update


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


def written_out(
    gates: tf.Tensor,
    memory: tf.Tensor,
    output: tf.Tensor,
    w_recurrent: tf.Tensor,
    w_projection: tf.Tensor | None = None,
    *,
    flags: dict[str, tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The specification of `lstm`: one step after the other."""
    ys = []
    for t in range(gates.shape[0]):
        if "reset" in flags:
            kept = tf.cast(~flags["reset"][t][:, None], tf.float64)
            memory, output = memory * kept, output * kept
        y, after = formula(gates[t], tf.einsum("bp,pgh->bgh", output, w_recurrent), memory)
        y = y if w_projection is None else y @ w_projection
        there = flags.get("mask", tf.ones(gates.shape[:2], tf.bool))[t][:, None]
        ys.append(tf.where(there, y, 0))
        memory, output = tf.where(there, after, memory), tf.where(there, y, output)
    return tf.stack(ys), memory, output


# Compiled with flags and a projection: tests/models/layers/recurrent_test.py.
@pytest.mark.parametrize(
    ("fuse", "names", "projection"),
    [
        (no_fusion, [], False),
        (no_fusion, ["mask"], True),
        (no_fusion, ["reset"], False),
        (no_fusion, ["mask", "reset"], False),
        (no_fusion, ["mask", "reset"], True),
        (XlaFusion(), [], False),
    ],
    ids=["plain", "mask, projected", "reset", "both", "both, projected", "compiled"],
)
def test_all_steps_are_one_after_the_other(fuse: Fuse, names: list[str], projection: bool) -> None:
    random = np.random.default_rng(0)
    t, b, h, p = 5, 3, 4, 2 if projection else 4
    shapes = [(t, b, 4, h), (b, h), (b, p), (p, 4, h), *([(h, p)] if projection else [])]
    args = [tf.constant(random.normal(size=shape)) for shape in shapes]
    flags = {name: tf.constant(random.random((t, b)) < 0.6) for name in names}

    def compiled(gates: tf.Tensor, memory: tf.Tensor, output: tf.Tensor, *w: tf.Tensor) -> Any:
        last = w[1] if projection else None
        return lstm(gates, w[0], last, memory, output, flags=flags, forget_bias=0.5, fuse=fuse)

    found = []
    for compute in (compiled, functools.partial(written_out, flags=flags)):
        with tf.GradientTape() as tape:
            tape.watch(args)
            results = compute(*args)
            loss = tf.add_n([tf.reduce_sum(tf.sin(3 * result)) for result in results])
        found.append([*results, *tape.gradient(loss, args)])
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients_are_refused() -> None:
    gates, weights = tf.ones([2, 1, 4, 3]), tf.ones([3, 4, 3])

    def run(gates: tf.Tensor) -> Any:
        start = tf.zeros([1, 3])
        with tf.GradientTape() as outer:
            outer.watch(gates)
            with tf.GradientTape() as inner:
                inner.watch(gates)
                y = lstm(gates, weights, None, start, start, flags={}, forget_bias=0.0)[0]
            # The gradient of y does not depend on the gates, that of the gates does.
            first = inner.gradient(y, gates)
        return outer.gradient(first, gates)

    for form in (run, tf.function(run, autograph=False)):
        with pytest.raises(NotImplementedError, match="set xla=none"):
            form(gates)
