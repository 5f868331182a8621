"""Names of dims through slices, tensor lists, functions and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.planning.dim_names import DimNames

B, L, D = 3, 3, 5  # as many times as examples: sizes do not tell which is which
X = ("batch", None, "embed")  # [B, L, D]


def names_of(compute: Callable[[tf.Tensor], Any]) -> Any:
    """Returns the names of the dims of a result for [batch, length, embed]."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [B, L, D])
        names = DimNames()
        names.register(x, X, learned=True)
        found = names.of(compute(x))
        assert found.learned
        return found.dims


def first(x: tf.Tensor) -> tf.Tensor:
    """Returns x of time 0: [batch, embed]."""
    return tf.transpose(x, [1, 0, 2])[0]


def from_zeros(x: tf.Tensor) -> tf.Tensor:
    body = lambda i, s: (i + 1, tf.tanh(s) + x[:, i])  # noqa: E731
    return tf.while_loop(lambda i, s: i < L, body, (0, tf.zeros([B, D])))[1]


def passed_on(x: tf.Tensor) -> tf.Tensor:
    """Each state gets the names of the next one, an iteration later."""
    zeros = tf.zeros([B, D])
    body = lambda i, a, b, c: (i + 1, b, c, x[:, i])  # noqa: E731
    return tf.while_loop(lambda i, *_: i < L, body, (0, zeros, zeros, zeros))[1]


def stacked(x: tf.Tensor) -> tf.Tensor:
    def body(i: Any, s: Any, found: Any) -> Any:
        s = tf.tanh(s) + x[:, i]
        return i + 1, s, found.write(i, s)

    found = tf.TensorArray(tf.float32, size=L, element_shape=[B, D])
    start = (0, tf.zeros([B, D]), found)
    return tf.while_loop(lambda i, *_: i < L, body, start, maximum_iterations=L)[2].stack()


def unstacked(x: tf.Tensor) -> tf.Tensor:
    rows = tf.TensorArray(tf.float32, size=L).unstack(tf.transpose(x, [1, 0, 2]))
    body = lambda i, s: (i + 1, s + rows.read(i))  # noqa: E731
    return tf.while_loop(lambda i, s: i < L, body, (0, tf.zeros([B, D])))[1]


def nested(x: tf.Tensor) -> tf.Tensor:
    def body(i: Any, s: Any) -> Any:
        inner = lambda j, t: (j + 1, tf.tanh(t) + s + x[:, j])  # noqa: E731
        return i + 1, tf.while_loop(lambda j, t: j < L, inner, (0, tf.zeros([B, D])))[1]

    return tf.while_loop(lambda i, s: i < 2, body, (0, tf.zeros([B, D])))[1]


def of_unknown_order(x: tf.Tensor) -> tf.Tensor:
    y = tf.concat([x, x[:, :1]], 1)  # [B, L + 1, D]
    return tf.transpose(y, tf.range(2, -1, -1) + tf.rank(y) - 3)


@pytest.mark.parametrize(
    ("compute", "names"),
    [
        (first, ("batch", "embed")),
        (lambda x: x[:, 0], ("batch", "embed")),
        (lambda x: x[..., 0], ("batch", None)),
        (lambda x: x[:, tf.newaxis, 1:], ("batch", None, None, "embed")),
        (lambda x: x[1:], (None, None, "embed")),
        (lambda x: x[tf.newaxis, ..., 0], (None, "batch", None)),
        (lambda x: tf.unstack(x, axis=1)[1], ("batch", "embed")),
        (lambda x: tf.stack([x, x], 1), ("batch", None, None, "embed")),
        (lambda x: tf.function(tf.tanh, autograph=False)(x), X),
        (from_zeros, ("batch", "embed")),
        (passed_on, ("batch", "embed")),
        (stacked, (None, "batch", "embed")),
        (unstacked, ("batch", "embed")),
        (nested, ("batch", "embed")),
        (of_unknown_order, ("embed", None, "batch")),
    ],
    ids=[
        "row", "column", "dots", "new axis", "part", "dots and new axis", "unstack", "stack",
        "function", "state", "states passed on", "list", "read list", "nested", "unknown order",
    ],
)  # fmt: skip
def test_names_follow_the_dims(compute: Callable[[tf.Tensor], Any], names: Any) -> None:
    assert names_of(compute) == names
