"""Softmax cross-entropy: values and gradients against float64 autodiff of the plain formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.primitives.softmax_cross_entropy import cross_entropy

FUSIONS = {"plain": no_fusion, "compiled": XlaFusion()}


def naive(
    x: tf.Tensor, table: tf.Tensor, *bias: tf.Tensor, labels: np.ndarray, smoothing: float
) -> tf.Tensor:
    """The definition: target and log-softmax in full."""
    logits = tf.einsum("...d,vd->...v", x, table)
    for b in bias:
        logits += b
    vocab = table.shape[0]
    target = (1 - smoothing) * tf.one_hot(labels, vocab, dtype=x.dtype) + smoothing / vocab
    return -tf.reduce_sum(target * tf.nn.log_softmax(logits), -1)


def value_and_gradients(
    function: Any, args: list[np.ndarray], dtype: tf.DType, weights: np.ndarray
) -> list[np.ndarray]:
    tensors = [tf.cast(a, dtype) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = function(*tensors)
        total = tf.reduce_sum(tf.cast(loss, tf.float64) * weights)
    assert loss.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    gradients = tape.gradient(total, tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)
    return [tf.cast(t, tf.float64).numpy() for t in (loss, *gradients)]


def assert_equal_naive(
    leading: tuple[int, ...],
    dim: int,
    vocab: int,
    *,
    fuse: Any = no_fusion,
    bias: bool = False,
    smoothing: float = 0.0,
    dtype: tf.DType = tf.float64,
    rtol: float = 1e-11,
    scale: float = 1.0,
    label_dtype: type = np.int32,
) -> None:
    rng = np.random.default_rng(0)
    args = [rng.normal(size=(*leading, dim)) * scale, rng.normal(size=(vocab, dim))]
    if bias:
        args.append(rng.normal(size=vocab))
    args = [tf.cast(tf.cast(a, dtype), tf.float64).numpy() for a in args]  # what the type can hold
    labels = rng.integers(0, vocab, size=leading).astype(label_dtype)
    weights = rng.uniform(size=leading) * (rng.uniform(size=leading) > 0.2)  # padding has weight 0

    def fast(x: tf.Tensor, table: tf.Tensor, *b: tf.Tensor) -> tf.Tensor:
        given = b[0] if b else None
        return cross_entropy(x, table, labels, bias=given, label_smoothing=smoothing, fuse=fuse)

    found = value_and_gradients(fast, args, dtype, weights)
    expected = value_and_gradients(
        lambda *a: naive(*a, labels=labels, smoothing=smoothing), args, tf.float64, weights
    )
    # The loss is a difference of logits: their rounding is what remains of it.
    logits = np.abs(args[0] @ args[1].T).max()
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol, atol=rtol * max(logits, 1))
    for f, e in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(f, e, rtol=rtol, atol=10 * rtol * max(np.abs(e).max(), 1e-3))


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_definition_in_float64(bias: bool, smoothing: float, fuse: str) -> None:
    assert_equal_naive((2, 3), 5, 7, bias=bias, smoothing=smoothing, fuse=FUSIONS[fuse])


@pytest.mark.parametrize(
    ("leading", "dim", "vocab"),
    [((1,), 3, 5), ((4,), 1, 3), ((2, 1), 3, 1), ((1, 1), 1, 1), ((2, 3, 2), 2, 9), ((), 3, 4)],
    ids=["one position", "dim 1", "vocab 1", "all 1", "three leading dims", "no leading dims"],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_small_shapes(leading: tuple[int, ...], dim: int, vocab: int, smoothing: float) -> None:
    for fuse in FUSIONS.values():
        assert_equal_naive(leading, dim, vocab, bias=True, smoothing=smoothing, fuse=fuse)


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "rtol"), [(tf.float32, 1e-6), (tf.bfloat16, 2e-2)])
def test_equals_the_definition_in_narrow_types(
    dtype: tf.DType, rtol: float, smoothing: float, fuse: str
) -> None:
    given = {"bias": True, "smoothing": smoothing, "fuse": FUSIONS[fuse]}
    assert_equal_naive((2, 5), 8, 30, dtype=dtype, rtol=rtol, **given)


def test_labels_may_be_int64() -> None:
    assert_equal_naive((2, 3), 5, 7, bias=True, label_dtype=np.int64)


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("scale", [1e-6, 1e2, 1e4])
def test_tiny_and_huge_logits_in_float32(scale: float, fuse: str) -> None:
    assert_equal_naive(
        (2, 3), 5, 7, bias=True, dtype=tf.float32, rtol=1e-5, scale=scale, fuse=FUSIONS[fuse]
    )


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize(("dtype", "scale"), [(tf.bfloat16, 10.0), (tf.float32, 1e4)])
def test_a_sure_prediction_costs_nothing_and_never_less(
    dtype: tf.DType, scale: float, fuse: str
) -> None:
    rng = np.random.default_rng(0)
    x, table = (tf.cast(rng.normal(size=shape), dtype) for shape in ((7, 32), (50, 32)))
    x *= tf.cast(scale, dtype)
    wide = tf.matmul(tf.cast(x, tf.float64), tf.cast(table, tf.float64), transpose_b=True)
    labels = tf.argmax(wide, -1, output_type=tf.int32)
    expected = tf.reduce_logsumexp(wide, -1) - tf.reduce_max(wide, -1)
    loss = cross_entropy(x, table, labels, fuse=FUSIONS[fuse])
    assert loss.numpy().min() >= 0
    # Of the second largest logit, where it is close, the rounding remains.
    np.testing.assert_allclose(loss, expected, atol=0.03)


@pytest.mark.parametrize("fuse", FUSIONS)
def test_logits_near_the_largest_float_stay_finite(fuse: str) -> None:
    x, table = tf.constant([[1e18, 0.0]]), tf.constant([[1e18, 0.0], [-1e18, 0.0], [0.0, 1.0]])
    for label in range(3):
        with tf.GradientTape() as tape:
            tape.watch((x, table))
            loss = cross_entropy(x, table, tf.constant([label]), fuse=FUSIONS[fuse])
        assert np.isfinite(loss).all()
        assert all(np.isfinite(g).all() for g in tape.gradient(loss, (x, table)))


def test_uniform_logits_give_the_logarithm_of_the_vocabulary() -> None:
    loss = cross_entropy(tf.ones([2, 3]), tf.zeros([11, 3]), tf.constant([4, 10]))
    np.testing.assert_allclose(loss, [np.log(11)] * 2, rtol=1e-6)


@pytest.mark.parametrize("compile_whole", [False, True])
def test_a_graph_gives_what_eager_gives(compile_whole: bool) -> None:
    rng = np.random.default_rng(0)
    x, table = tf.constant(rng.normal(size=(2, 3, 5))), tf.constant(rng.normal(size=(7, 5)))
    labels = tf.constant(rng.integers(0, 7, size=(2, 3)))

    def run(x: tf.Tensor, table: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, table))
            loss = cross_entropy(x, table, labels, label_smoothing=0.1)
        return loss, *tape.gradient(loss, (x, table))

    graph = tf.function(run, autograph=False, jit_compile=compile_whole)
    for found, expected in zip(graph(x, table), run(x, table), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.125])
def test_gradients_of_frequent_labels_are_summed_in_float32(
    dtype: tf.DType, smoothing: float
) -> None:
    """All logits are 0, so every gradient is (share of the label) - 1/4: summed exactly here."""
    table, bias = tf.zeros([4, 2], dtype), tf.zeros([4], dtype)
    with tf.GradientTape() as tape:
        tape.watch([table, bias])
        loss = cross_entropy(
            tf.ones([4096, 2], dtype),
            table,
            tf.zeros([4096], tf.int32),
            bias=bias,
            label_smoothing=smoothing,
        )
    found = tape.gradient(loss, [table, bias])
    expected = 4096 * (0.25 - np.array([1, 0, 0, 0]) * (1 - smoothing) - smoothing / 4)
    for gradient in found:
        by_class = tf.cast(gradient, tf.float32).numpy().reshape(4, -1)
        np.testing.assert_allclose(by_class, expected[:, None] + 0 * by_class, rtol=4e-3)
