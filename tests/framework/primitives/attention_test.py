"""The attention core against the naive form: values by NumPy, gradients by fp64 autodiff."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.primitives.attention import attend, attend_known, mean_probabilities
from tekso.framework.primitives.fusion import XlaFusion, no_fusion

B, T, S, H = 2, 3, 5, 4  # batch, queries, keys, head dim


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def inputs(num_heads: int, num_kv_heads: int) -> list[np.ndarray]:
    return [
        random(B, T, num_heads, H),
        random(B, S, num_kv_heads, H, seed=1),
        random(B, S, num_kv_heads, H, seed=2),
    ]


def numpy_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: Any = None, bias: Any = 0.0
) -> np.ndarray:
    """One head and one query at a time, from the definition."""
    out = np.zeros_like(q)
    groups = q.shape[2] // k.shape[2]
    full = [q.shape[0], q.shape[2], q.shape[1], k.shape[1]]
    mask = np.ones(full, bool) if mask is None else np.broadcast_to(mask, full)
    bias = np.broadcast_to(bias, full)
    for b, t, n in np.ndindex(q.shape[:3]):
        keys, values = k[b, :, n // groups], v[b, :, n // groups]
        scores = (scale * keys @ q[b, t, n] + bias[b, n, t])[mask[b, n, t]]
        if scores.size:
            probs = np.exp(scores) / np.exp(scores).sum()
            out[b, t, n] = probs @ values[mask[b, n, t]]
    return out


def naive_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    scale: float,
    mask: Any = None,
    bias: Any = None,
    keep: Any = None,
) -> tf.Tensor:
    """In plain TensorFlow ops, for autodiff; `keep` multiplies the probabilities."""
    groups = q.shape[2] // k.shape[2]
    k, v = tf.repeat(k, groups, axis=2), tf.repeat(v, groups, axis=2)
    scores = scale * tf.einsum("btnh,bsnh->bnts", q, k)
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = tf.where(mask, scores, -1e30)
    probs = tf.nn.softmax(scores)
    if mask is not None:
        probs = tf.where(mask, probs, 0)
    if keep is not None:
        probs *= keep
    return tf.einsum("bnts,bsnh->btnh", probs, v)


def gradients(function: Any, *args: np.ndarray) -> list[tf.Tensor]:
    tensors = [tf.constant(a) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        y = function(*tensors)
        loss = tf.reduce_sum(y * random(*y.shape, seed=9))
    return [y, *tape.gradient(loss, tensors)]


def assert_all_close(got: list[Any], want: list[Any], tolerance: float = 1e-12) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_values_are_those_of_the_formula(num_heads: int, num_kv_heads: int) -> None:
    q, k, v = inputs(num_heads, num_kv_heads)
    mask = np.random.default_rng(3).random([B, 1, T, S]) < 0.6
    mask[1, 0, 2] = False  # a query that sees nothing
    bias = random(1, num_heads, T, S)

    got = attend(q, k, v, scale=0.3, mask=mask, bias=tf.constant(bias))

    np.testing.assert_allclose(got, numpy_attention(q, k, v, 0.3, mask, bias), rtol=1e-12)
    assert not np.any(got[1, 2])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2)])
@pytest.mark.parametrize("with_mask", [False, True])
def test_gradients_equal_autodiff(num_heads: int, num_kv_heads: int, with_mask: bool) -> None:
    mask = np.tril(np.ones([T, S], bool), 1)[None, None] if with_mask else None
    args = inputs(num_heads, num_kv_heads)

    got = gradients(lambda q, k, v: attend(q, k, v, scale=0.7, mask=mask), *args)
    want = gradients(lambda q, k, v: naive_attention(q, k, v, 0.7, mask), *args)

    assert_all_close(got, want)


def test_gradients_of_a_query_that_sees_nothing_are_zero_and_finite() -> None:
    mask = np.ones([B, 1, T, S], bool)
    mask[0, 0, 1] = False
    args = inputs(2, 2)

    got = gradients(lambda q, k, v: attend(q, k, v, scale=0.7, mask=mask), *args)
    want = gradients(lambda q, k, v: naive_attention(q, k, v, 0.7, mask), *args)

    assert_all_close(got, want)
    assert not np.any(got[1][0, 1])


@pytest.mark.parametrize(
    "shape", [[B, 6, T, S], [1, 6, T, S], [B, 1, 1, S], [6, T, 1], [T, S], [1, 1, 1, 1]]
)
def test_bias_gradient_has_the_shape_of_a_broadcast_bias(shape: list[int]) -> None:
    mask = np.random.default_rng(3).random([B, 1, T, S]) < 0.7
    args = [*inputs(6, 2), random(*shape, seed=5)]

    got = gradients(lambda q, k, v, b: attend(q, k, v, scale=0.7, mask=mask, bias=b), *args)
    want = gradients(lambda q, k, v, b: naive_attention(q, k, v, 0.7, mask, b), *args)

    assert got[4].shape == shape
    assert_all_close(got, want)


def test_dropout_masks_forward_and_backward_alike() -> None:
    rate, offset, heads, kv_heads = 0.4, 7, 4, 2
    key = counter_hash.root_key(3, 5)
    groups = heads // kv_heads
    keep = counter_hash.keep_mask(key, rate, [B, kv_heads, groups * T, S], offset)
    keep = np.reshape(keep, [B, heads, T, S])
    args = inputs(heads, kv_heads)
    mask = np.tril(np.ones([T, S], bool), 1)[None, None]

    def dropped(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        return attend(q, k, v, scale=0.7, mask=mask, dropout=(key, offset, rate))

    got = gradients(dropped, *args)
    want = gradients(lambda q, k, v: naive_attention(q, k, v, 0.7, mask, keep=keep), *args)

    assert 0.2 < np.mean(keep == 0) < 0.6
    assert_all_close(got, want, 1e-6)  # 1 / (1 - rate) is a float32


def test_dropout_of_a_part_of_the_batch_is_that_part_of_the_whole() -> None:
    key = counter_hash.root_key(3, 5)
    args = inputs(2, 2)

    whole = attend(*args, scale=0.7, dropout=(key, 10, 0.5))
    second = attend(*[a[1:] for a in args], scale=0.7, dropout=(key, 11, 0.5))

    np.testing.assert_allclose(second, whole[1:], rtol=1e-12)


def test_compiled_clusters_give_the_same() -> None:
    fuse = XlaFusion()
    mask = np.tril(np.ones([T, S], bool), 1)[None, None]
    bias = random(1, 4, T, S).astype(np.float32)
    args = [*(a.astype(np.float32) for a in inputs(4, 2)), bias]
    dropout = (counter_hash.root_key(3, 5), 2, 0.5)

    def run(fuse: Any) -> list[tf.Tensor]:
        def compute(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
            return tf.cast(
                attend(q, k, v, scale=0.7, mask=mask, bias=bias, dropout=dropout, fuse=fuse),
                tf.float64,
            )

        return gradients(compute, *args)

    assert_all_close(run(fuse), run(no_fusion), 1e-5)


def test_bfloat16_softmax_is_computed_in_float32() -> None:
    q, k, v = (tf.cast(a, tf.bfloat16) for a in inputs(2, 2))
    # A large common bias: in bfloat16 it would swallow the scores.
    bias = tf.fill([1, 1, 1, S], 1000.0)

    got = attend(q, k, v, scale=0.7, bias=bias)
    want = numpy_attention(*(np.float64(a) for a in (q, k, v)), 0.7)

    assert got.dtype == tf.bfloat16
    np.testing.assert_allclose(np.float64(got), want, atol=0.05)  # 8 bits of mantissa


def test_gradients_of_bfloat16_scores_are_computed_in_float32() -> None:
    q, k, v = (3.0 * random(8, 6, 2, 16), random(8, 6, 2, 16, seed=1), random(8, 6, 2, 16, seed=2))
    rounded = [tf.cast(a, tf.bfloat16) for a in (q, k, 1.0 + v, random(1, 2, 6, 6))]

    def all_gradients(dtype: Any) -> list[np.ndarray]:
        args = [tf.cast(a, dtype) for a in rounded]
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = attend(*args[:3], scale=0.25, bias=args[3])
        seed = tf.cast(random(*y.shape, seed=9), tf.bfloat16)
        found = tape.gradient(y, args, output_gradients=tf.cast(seed, dtype))
        return [np.float64(g) for g in found]

    exact = all_gradients(tf.float64)
    for got, want in zip(all_gradients(tf.bfloat16), exact, strict=True):
        # With the products and the sum of the softmax's gradient in bfloat16, it is 0.0083 to 0.01.
        assert np.linalg.norm(got - want) < 0.008 * np.linalg.norm(want)


def test_kv_heads_that_do_not_divide_the_heads_are_named() -> None:
    with pytest.raises(ValueError, match="2 kv heads do not divide 3 heads"):
        attend(*inputs(3, 2), scale=1.0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_mean_probabilities_are_those_that_weigh_the_values(
    num_heads: int, num_kv_heads: int
) -> None:
    q, k, _ = inputs(num_heads, num_kv_heads)
    mask = np.random.default_rng(4).random([B, 1, T, S]) > 0.4
    mask[1, 0, 2] = False  # a query that sees nothing
    bias = random(1, num_heads, T, S, seed=3)

    k_first = tf.transpose(k, [0, 2, 1, 3])
    hidden = {"mask": tf.constant(mask), "bias": tf.constant(bias)}
    got = mean_probabilities(q, k_first, scale=0.7, **hidden)

    one_hot = np.broadcast_to(np.eye(S)[None, :, None], [B, S, num_kv_heads, S])
    wide = np.concatenate([q, np.zeros([B, T, num_heads, S - H])], -1)
    keys = np.concatenate([k, np.zeros([B, S, num_kv_heads, S - H])], -1)
    want = numpy_attention(wide, keys, one_hot, 0.7, mask, bias).mean(2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert got.dtype == tf.float32
    assert np.abs(got[1, 2]).max() == 0


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_kept_keys_and_values_are_attended_to_by_the_formula(
    num_heads: int, num_kv_heads: int
) -> None:
    q, k, v = inputs(num_heads, num_kv_heads)
    mask = np.random.default_rng(4).random([B, 1, T, S]) > 0.4
    mask[1, 0, 2] = False  # a query that sees nothing
    bias = random(1, num_heads, T, S, seed=3)
    kept = [tf.transpose(x, [0, 2, 1, 3]) for x in (k, v)]

    hidden = {"mask": tf.constant(mask), "bias": tf.constant(bias)}
    got = attend_known(tf.constant(q), *kept, scale=0.7, **hidden)

    np.testing.assert_allclose(got, numpy_attention(q, k, v, 0.7, mask, bias), rtol=1e-5)
