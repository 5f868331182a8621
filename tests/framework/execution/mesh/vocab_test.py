"""Lookup and cross-entropy over a split vocabulary, its parts side by side on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.execution.mesh import vocab
from tekso.framework.primitives import softmax_cross_entropy
from tekso.framework.primitives.fusion import no_fusion
from tekso.framework.theta import Theta
from tekso.models.layers.softmax import Softmax

VOCAB, DIM = 6, 3
TABLE = np.random.default_rng(0).normal(size=(VOCAB, DIM))


class Parts:
    """A context whose vocabulary lies in so many parts."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def layout_of(self, weight: Any) -> Any:
        return ("model", None) if self._parts > 1 else (None, None)

    def axes(self, dims: Any, shape: Any) -> Any:
        return (None,) * len(dims)

    def reshard(self, x: Any, axes: Any) -> Any:
        return x

    fuse = staticmethod(no_fusion)

    def axis_size(self, axis: str) -> int:
        return self._parts


@pytest.mark.parametrize("parts", [2, 3])
def test_lookup_has_the_rows(parts: int) -> None:
    ids = np.array([[0, 5, 2], [1, 3, 2]], np.int32)
    with tf.GradientTape() as tape:
        table = tf.constant(TABLE)
        tape.watch(table)
        rows = vocab.lookup(Parts(parts), table, tf.constant(ids))
        total = tf.reduce_sum(rows[0] ** 2)
    np.testing.assert_allclose(rows, TABLE[ids], rtol=1e-12)
    wanted = np.zeros_like(TABLE)
    wanted[ids[0]] = 2 * TABLE[ids[0]]
    np.testing.assert_allclose(tape.gradient(total, table).numpy(), wanted, rtol=1e-12)


def in_parts(ids: list[int]) -> Any:
    """The rows of ids, and the cross-entropy of them as labels; the vocabulary is in two parts."""
    x, table = (tf.constant(TABLE, tf.float32) for _ in range(2))
    ids = tf.constant(ids)
    rows = vocab.lookup(Parts(2), table, ids)
    return rows, vocab.cross_entropy(Parts(2), x[: ids.shape[0]], table, ids)


@pytest.mark.parametrize("of_none", [VOCAB, -1])
def test_an_id_of_no_row_is_an_error_as_in_a_whole_table(of_none: int) -> None:
    context, table = Parts(2), tf.constant(TABLE)
    said = rf"indices\[1\] = {of_none} is not in \[0, {VOCAB}\)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        vocab.lookup(context, table, tf.constant([5, of_none]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        vocab.cross_entropy(context, table[:2], table, tf.constant([5, of_none]))


def test_an_id_of_no_row_is_nan_where_a_lookup_does_not_fail() -> None:
    """As on a GPU or TPU: XLA looks up the closest row."""
    rows, losses = tf.function(in_parts, jit_compile=True, autograph=False)([0, VOCAB, 3, -1])
    for found in (rows[:, 0], losses):
        assert np.isnan(found).tolist() == [False, True, False, True]


@pytest.mark.parametrize(("smoothing", "classes"), [(0.0, VOCAB), (0.1, VOCAB), (0.1, 5)])
def test_cross_entropy_is_that_of_the_formula(smoothing: float, classes: int) -> None:
    x = np.random.default_rng(1).normal(size=(2, 2, DIM))
    labels = np.array([[4, 0], [5, 1]], np.int32)
    tensors = tf.constant(x), tf.constant(TABLE), tf.constant(labels)
    found = vocab.cross_entropy(
        Parts(2), *tensors, label_smoothing=smoothing, classes=classes
    ).numpy()
    logits = x @ TABLE.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    share = (1 - smoothing) * np.eye(VOCAB)[labels]
    share[..., :classes] += smoothing / classes
    np.testing.assert_allclose(found, -(share * log_p).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_of_a_frequent_row_is_not_rounded_at_every_sum(parts: int) -> None:
    ids = tf.zeros([1, 2048], tf.int32)  # in bfloat16, 256 + 1 is 256
    with tf.GradientTape() as tape:
        table = tf.zeros([VOCAB, DIM], tf.bfloat16)
        tape.watch(table)
        total = tf.reduce_sum(tf.cast(vocab.lookup(Parts(parts), table, ids), tf.float32))
    gradient = tape.gradient(total, table)
    assert gradient.dtype == tf.bfloat16
    wanted = np.zeros([VOCAB, DIM], np.float32)
    wanted[0] = 2048
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("parts", [0, 2])
def test_probabilities_of_a_large_vocabulary_do_not_vanish_in_float16(
    parts: int, smoothing: float
) -> None:
    """On one device (0) and in parts; a probability times the weight is about 1 / 7,500,000."""
    rng, size, classes = np.random.default_rng(4), 30_000, 29_990
    x = tf.constant(rng.normal(size=(1, 8, 16)), tf.float16)
    table = tf.constant(rng.normal(0.3, 0.02, size=(size, 16)), tf.float16)
    bias = tf.concat([tf.zeros([classes]), tf.fill([size - classes], -1e9)], 0)
    labels = tf.constant(rng.integers(0, classes, (1, 8)), tf.int32)
    weight = 1 / 256
    with tf.GradientTape() as tape:
        tape.watch([x, table, bias])
        spread = {"bias": bias, "label_smoothing": smoothing, "classes": classes}
        if parts:
            loss = vocab.cross_entropy(Parts(parts), x, table, labels, **spread)
        else:
            loss = softmax_cross_entropy.cross_entropy(x, table, labels, **spread)
        total = weight * tf.reduce_sum(loss)
    found = tape.gradient(total, [x, table, bias])
    assert [one.dtype for one in found] == [tf.float16, tf.float16, tf.float32]
    x, table = (tf.cast(one, tf.float64).numpy() for one in (x[0], table))
    logits = x @ table.T + bias.numpy()
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[:, :classes] -= smoothing / classes
    p[np.arange(8), labels[0]] -= 1 - smoothing
    for one, wanted in zip(found, (p @ table, p.T @ x, p.sum(0)), strict=True):
        one = np.reshape(tf.cast(one, tf.float64), wanted.shape)
        off = np.linalg.norm(one - weight * wanted) / np.linalg.norm(weight * wanted)
        assert off < 0.003


@pytest.mark.parametrize("parts", [1, 2])
def test_padding_of_a_float16_table_with_a_bias_is_no_nan(parts: int) -> None:
    layer = Softmax.Params(input_dim=2, vocab_size=5, vocab_multiple=8, use_bias=True).instantiate()
    bias = layer._bias(Theta(b=tf.zeros([8], tf.float16)))
    x, table = tf.ones([3, 2], tf.float16), tf.ones([8, 2], tf.float16)
    labels = tf.constant([0, 4, 2])
    found = vocab.cross_entropy(
        Parts(parts), x, table, labels, bias=bias, label_smoothing=0.1, classes=5
    )
    np.testing.assert_allclose(found, np.log(5) * np.ones(3), rtol=1e-3)
