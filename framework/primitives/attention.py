"""Attention: scores, softmax and weighted sum, with a custom gradient.

Of the [T, S] matrices, only the probabilities are saved for the backward pass.

B batch, T query positions, S key positions, N heads, K kv heads, G = N / K heads per kv head,
H head dim.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.precision import widen


def attend(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    *,
    scale: float,
    mask: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
    dropout: tuple[tf.Tensor, Any, float] | None = None,
    fuse: Fuse = no_fusion,
) -> tf.Tensor:
    """Returns softmax(scale * q k^T + bias) v, with the softmax over unmasked keys.

    The output is 0 for a query whose keys are all masked. The softmax and its gradient are computed
    in float32.

    Shapes:
      q: [B, T, N, H], k, v: [B, S, K, H] with K dividing N
      mask: bool, bias: float, broadcastable to [B, N, T, S]; bias is differentiable
      dropout: (key, example offset, rate) of the dropout of the probabilities
      returns: [B, T, N, H]
    Raises:
      ValueError: the kv heads do not divide the heads.
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries).
    """
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"attend: {num_kv_heads} kv heads do not divide {num_heads} heads")
    groups = num_heads // num_kv_heads
    masks, biases = ([] if t is None else [t] for t in (mask, bias))
    has_mask, has_bias = mask is not None, bias is not None
    noise = [] if dropout is None else [dropout[0], tf.cast(dropout[1], tf.uint32)]
    rate = 0.0 if dropout is None else dropout[2]

    @custom_gradient
    def run(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *biases: tf.Tensor) -> Any:
        q_heads, k_heads, v_heads = fuse(_split_heads, scale=scale, groups=groups)(q, k, v)
        scores = tf.matmul(q_heads, k_heads, transpose_b=True)
        soft = fuse(_softmax, has_mask=has_mask, has_bias=has_bias, groups=groups, rate=rate)
        kept, *probs = soft(scores, *masks, *biases, *noise)
        out = fuse(_merge_heads, groups=groups)(tf.matmul(kept, v_heads))

        def grad(dout: tf.Tensor) -> list[tf.Tensor]:
            dout = fuse(_split_one, groups=groups)(dout)
            dkept = tf.matmul(dout, v_heads, transpose_b=True)
            dv = tf.matmul(kept, dout, transpose_a=True)
            dscores = fuse(_softmax_gradient, rate=rate)(dkept, probs[0] if probs else kept, *noise)
            dq = tf.matmul(dscores, k_heads)
            dk = tf.matmul(dscores, q_heads, transpose_a=True)
            dq, dk, dv = fuse(_merge_gradients, scale=scale, groups=groups)(dq, dk, dv)
            return [dq, dk, dv, *(_bias_gradient(dscores, b, groups) for b in biases)]

        return out, grad

    return run(q, k, v, *biases)


def _split_one(x: tf.Tensor, *, groups: int) -> tf.Tensor:
    """Maps [B, T, N, H] to [B, K, G * T, H]: one matrix with all queries of a kv head."""
    b, t, n, h = x.shape
    x = tf.transpose(x, [0, 2, 1, 3])
    return tf.reshape(x, [b, n // groups, groups * t, h])


def _merge_one(x: tf.Tensor, *, groups: int) -> tf.Tensor:
    b, k, gt, h = x.shape
    return tf.transpose(tf.reshape(x, [b, k * groups, gt // groups, h]), [0, 2, 1, 3])


def _split_heads(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *, scale: float, groups: int) -> Any:
    return (
        _split_one(q * scale, groups=groups),
        tf.transpose(k, [0, 2, 1, 3]),
        tf.transpose(v, [0, 2, 1, 3]),
    )


def _merge_heads(x: tf.Tensor, *, groups: int) -> tf.Tensor:
    return _merge_one(x, groups=groups)


def _merge_gradients(
    dq: tf.Tensor, dk: tf.Tensor, dv: tf.Tensor, *, scale: float, groups: int
) -> Any:
    return (
        _merge_one(dq * scale, groups=groups),
        tf.transpose(dk, [0, 2, 1, 3]),
        tf.transpose(dv, [0, 2, 1, 3]),
    )


def _softmax(
    scores: tf.Tensor, *rest: tf.Tensor, has_mask: bool, has_bias: bool, groups: int, rate: float
) -> Any:
    given = iter(rest)
    b, k, gt, s = scores.shape
    x = tf.reshape(widen(scores), [b, k * groups, gt // groups, s])
    mask = next(given) if has_mask else None
    if has_bias:
        x += tf.cast(next(given), x.dtype)
    if mask is not None:
        x = tf.where(mask, x, x.dtype.min)
    e = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
    if mask is not None:
        e = tf.where(mask, e, 0)  # else a row without unmasked keys sums to the number of keys
    total = tf.reduce_sum(e, -1, keepdims=True)
    probs = e / (tf.where(total > 0, total, 1) if mask is not None else total)
    flat = tf.cast(tf.reshape(probs, scores.shape), scores.dtype)
    if not rate:
        return [flat]
    return [_dropped(flat, *given, rate=rate), flat]


def _dropped(probs: tf.Tensor, key: tf.Tensor, offset: tf.Tensor, *, rate: float) -> tf.Tensor:
    return probs * tf.cast(
        counter_hash.keep_mask(key, rate, probs.shape.as_list(), offset), probs.dtype
    )


def _softmax_gradient(
    dkept: tf.Tensor, probs: tf.Tensor, *noise: tf.Tensor, rate: float
) -> tf.Tensor:
    d = widen(_dropped(dkept, *noise, rate=rate) if rate else dkept)
    wide = widen(probs)
    return tf.cast(wide * (d - tf.reduce_sum(d * wide, -1, keepdims=True)), probs.dtype)


def _bias_gradient(dscores: tf.Tensor, bias: tf.Tensor, groups: int) -> tf.Tensor:
    b, k, gt, s = dscores.shape
    d = tf.reshape(dscores, [b, k * groups, gt // groups, s])
    padded = [1] * (4 - bias.shape.rank) + bias.shape.as_list()
    axes = [i for i, (n, m) in enumerate(zip(padded, d.shape, strict=True)) if n == 1 and m != 1]
    # A mesh sums over its devices in the type of this sum.
    return tf.cast(tf.reshape(tf.reduce_sum(widen(d), axes, keepdims=True), bias.shape), bias.dtype)


def attend_known(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    *,
    scale: float,
    mask: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the result of `attend` for cached keys and values, which have heads before length.

    A decoding step has few queries and many keys, so transposing the keys would cost more than the
    attention itself. There is no dropout.

    Shapes:
      q: [B, T, N, H], k, v: [B, K, S, H] with K dividing N
      mask: bool, bias: float, broadcastable to [B, N, T, S]
      returns: [B, T, N, H]
    """
    groups = q.shape[2] // k.shape[1]
    probs = _known_probabilities(q, k, scale, mask, bias)
    return _merge_one(tf.matmul(probs, v), groups=groups)


def mean_probabilities(
    q: tf.Tensor,
    k: tf.Tensor,
    *,
    scale: float,
    mask: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the attention weights, averaged over heads, in float32.

    They are the probabilities of `attend` without dropout, for use in decoding and for display. A
    query whose keys are all masked has weights 0.

    Shapes:
      q: [B, T, N, H], k: [B, K, S, H] with K dividing N
      mask: bool, bias: float, broadcastable to [B, N, T, S]
      returns: [B, T, S] float32
    """
    q, k = tf.cast(q, tf.float32), tf.cast(k, tf.float32)
    probs = _known_probabilities(q, k, scale, mask, bias)
    return tf.reduce_mean(tf.reshape(probs, [q.shape[0], q.shape[2], q.shape[1], -1]), 1)


def _known_probabilities(
    q: tf.Tensor, k: tf.Tensor, scale: float, mask: tf.Tensor | None, bias: tf.Tensor | None
) -> tf.Tensor:
    """Returns the probabilities [B, K, G * T, S] for q [B, T, N, H] and k [B, K, S, H]."""
    (b, t, n, _), groups = q.shape, q.shape[2] // k.shape[1]
    scores = tf.matmul(_split_one(q * scale, groups=groups), k, transpose_b=True)
    x = tf.reshape(widen(scores), [b, n, t, scores.shape[-1]])
    if bias is not None:
        x += tf.cast(bias, x.dtype)
    if mask is None:
        probs = tf.nn.softmax(x)
    else:  # without a gradient, fewer operations than in `_softmax` are enough
        probs = tf.nn.softmax(tf.where(mask, x, x.dtype.min))
        probs *= tf.cast(tf.reduce_any(mask, -1, keepdims=True), x.dtype)
    return tf.cast(tf.reshape(probs, scores.shape), scores.dtype)
