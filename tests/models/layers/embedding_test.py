"""Embedding: lookup, its scale, the tied softmax, and both gradients of the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.embedding import Embedding

IDS = np.array([[0, 6, 3], [6, 6, 1]])
LABELS = np.array([[6, 0, 2], [6, 1, 1]])


def build(**kwargs: object) -> tuple[Embedding, Any, np.ndarray]:
    layer = Embedding.Params(vocab_size=7, dim=4, **kwargs).instantiate()
    table = np.random.default_rng(0).normal(size=(7, 4))
    return layer, layer.theta({"table": tf.constant(table)}), table


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("sqrt_dim", 2.0)])
def test_looks_up_rows_and_scales_them(scale: str, factor: float) -> None:
    layer, theta, table = build(scale=scale)
    for ids in (IDS, IDS[0], np.int32(5), IDS.astype(np.int64)):
        x = layer.fprop(theta, tf.constant(ids), StepContext())
        np.testing.assert_allclose(x, factor * table[ids], rtol=1e-15)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint32", "uint64"])
def test_looks_up_ids_of_every_integer_type(dtype: str) -> None:
    layer, theta, table = build()
    ids = tf.constant(IDS.astype(dtype))
    np.testing.assert_array_equal(layer.fprop(theta, ids, StepContext()), table[IDS])
    np.testing.assert_array_equal(layer.fprop_shared(theta, ids, StepContext())[0], table[IDS])


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_rejects_ids_that_are_not_integers_and_says_how_to_convert_them(dtype: str) -> None:
    layer, theta, _ = build()
    ids = tf.constant(IDS.astype(dtype))
    message = rf"ids are {dtype} \(2, 3\), but must be integers.*tf.cast\(ids, tf.int32\)"
    for method in (layer.fprop, layer.fprop_shared):
        with pytest.raises(ValueError, match=message):
            method(theta, ids, StepContext())


def test_logits_are_products_with_the_unscaled_table() -> None:
    layer, theta, table = build(scale="sqrt_dim")
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    np.testing.assert_allclose(
        layer.logits(theta, tf.constant(x), StepContext()), x @ table.T, rtol=1e-12
    )
    np.testing.assert_allclose(
        layer.logits(theta, tf.constant(x[0, 0]), StepContext()), table @ x[0, 0], rtol=1e-12
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_that_of_the_logits(smoothing: float) -> None:
    layer, theta, table = build()
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    found = layer.cross_entropy(
        theta, tf.constant(x), tf.constant(LABELS), StepContext(), label_smoothing=smoothing
    )
    logits = x @ table.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(7)[LABELS] + smoothing / 7
    np.testing.assert_allclose(found, -(target * log_p).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_the_table_gets_the_gradients_of_both_uses(tied: bool) -> None:
    layer, theta, table = build(scale="sqrt_dim")
    ctx = StepContext()
    with tf.GradientTape() as tape:
        tape.watch(theta)
        if tied:
            x, later = layer.fprop_shared(theta, tf.constant(IDS), ctx)
        else:
            x, later = layer.fprop(theta, tf.constant(IDS), ctx), theta
        loss = tf.reduce_sum(layer.cross_entropy(later, tf.sin(x), tf.constant(LABELS), ctx))
    found = tf.convert_to_tensor(tape.gradient(loss, theta.table))

    def naive(table: np.ndarray) -> float:
        logits = np.sin(2 * table[IDS]) @ table.T
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return -float(np.take_along_axis(log_p, LABELS[..., None], -1).sum())

    h = 1e-5
    expected = np.zeros_like(table)
    for at in np.ndindex(*table.shape):
        step = np.zeros_like(table)
        step[at] = h
        expected[at] = (naive(table + step) - naive(table - step)) / (2 * h)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_weights_dims_and_first_values() -> None:
    layer = Embedding.Params(vocab_size=300, dim=64).instantiate()
    (spec,) = layer.specs().values()
    assert (spec.path, spec.shape, spec.dims) == ("table", (300, 64), ("vocab", "embed"))
    assert np.std(layer.init().table) == pytest.approx(1 / 8, rel=0.03)  # 1 / sqrt(dim)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_gradients_of_a_frequent_id_are_summed_in_float32(dtype: tf.DType, shared: bool) -> None:
    """In bfloat16, 256 + 1 is 256; in float16, 2048 + 1 is 2048."""
    layer = Embedding.Params(vocab_size=3, dim=2).instantiate()
    table = tf.zeros([3, 2], dtype)
    form = layer.fprop_shared if shared else layer.fprop
    with tf.GradientTape() as tape:
        tape.watch(table)
        found = form(Theta(table=table), tf.ones([2, 2048], tf.int32), StepContext(mode="train"))
        x = found[0] if shared else found
    gradient = tf.convert_to_tensor(tape.gradient(x, table))
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), [[0, 0], [4096, 4096], [0, 0]])
