"""Softmax cross-entropy of x table^T, with a gradient that does not compute softmax - one_hot.

With e = exp(logits - max) and its row sums q, the gradients are matrix products with e. The row
factors 1 / q are applied to [positions, embed] matrices instead of e, and the one-hot part is a
gather and a scatter. This saves two passes over [positions, vocab].
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.lookup import add_rows
from tekso.framework.primitives.precision import widen, widen_half
from tekso.framework.primitives.products import product


def cross_entropy(
    x: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    *,
    bias: tf.Tensor | None = None,
    label_smoothing: float = 0.0,
    classes: int | None = None,
    fuse: Fuse = no_fusion,
) -> tf.Tensor:
    """Returns the cross-entropy of every position, in nats.

    Args:
      x: vectors.
      table: a row for each class.
      labels: the class of every position.
      bias: added to the logits; None: none.
      label_smoothing: share of the target probability that is spread evenly.
      classes: number of rows, from the first one, over which it is spread; None: all rows.
      fuse: compiles elementwise clusters.

    Shapes:
      x: [..., embed], table: [vocab, embed], labels: [...] int32 in [0, vocab), bias: [vocab]
      returns: [...], float32 (float64 for float64 inputs)
    """
    shape = labels.shape
    flat_labels = tf.reshape(labels, [-1])
    smooth = label_smoothing

    @custom_gradient
    def run(x: tf.Tensor, table: tf.Tensor, *bias: tf.Tensor) -> Any:
        vocab = table.shape[0]
        logits = product(x, table, transpose_b=True, batched=True, fuse=fuse)
        e, top, total = fuse(_exponentials)(logits, *bias)
        # Gathered from the same logits as in the sum: in bfloat16, recomputed logits would differ
        # by rounding.
        label_logit = tf.cast(tf.gather(logits, flat_labels, batch_dims=1), top.dtype)
        for b in bias:
            label_logit += tf.cast(tf.gather(b, flat_labels), top.dtype)
        loss = tf.squeeze(tf.math.log(total) + top, 1) - (1 - smooth) * label_logit
        if smooth:
            mean_row = tf.reduce_mean(widen(table[:classes]), 0)
            mean_logit = tf.linalg.matvec(widen(x), mean_row)
            if bias:
                mean_logit += tf.cast(tf.reduce_mean(widen(bias[0][:classes])), loss.dtype)
            loss -= smooth * mean_logit

        def grad(dloss: tf.Tensor) -> list[tf.Tensor]:
            own_x, own_table, own_e = widen_half(x), widen_half(table), widen_half(e)
            rows = tf.gather(own_table, flat_labels)
            weight, weighted, target = fuse(_row_factors, keep=1 - smooth)(dloss, total, own_x)
            expected = product(own_e, own_table, fuse=fuse)
            dx = fuse(_input_gradient, keep=1 - smooth)(expected, weight, rows, dloss)
            dtable = product(own_e, weighted, transpose_a=True, batched=True, fuse=fuse)
            if smooth:
                even = smooth * tf.expand_dims(dloss, 1) * tf.expand_dims(mean_row, 0)
                dx -= tf.cast(even, dx.dtype)
                share = _even_share(vocab, classes, smooth, dtable.dtype)
                summed = tf.linalg.matvec(own_x, tf.cast(dloss, own_x.dtype), transpose_a=True)
                dtable -= tf.expand_dims(summed, 0) * tf.expand_dims(share, 1)
            dtable = add_rows(dtable, flat_labels, target)
            gradients = [tf.cast(dx, x.dtype), tf.cast(dtable, table.dtype)]
            if bias:
                dbias = tf.linalg.matvec(own_e, tf.squeeze(weight, 1), transpose_a=True)
                dbias = tf.cast(dbias, dloss.dtype)
                if smooth:
                    share = _even_share(vocab, classes, smooth, dbias.dtype)
                    dbias -= share * tf.reduce_sum(dloss)
                dbias = add_rows(dbias, flat_labels, (smooth - 1) * dloss)
                gradients.append(tf.cast(dbias, bias[0].dtype))
            return gradients

        return loss, grad

    flat_x = tf.reshape(x, [-1, x.shape[-1]])
    return tf.reshape(run(flat_x, table, *([] if bias is None else [bias])), shape)


def _even_share(vocab: int, classes: int | None, smooth: float, dtype: tf.DType) -> tf.Tensor:
    """Returns the probability that smoothing gives to every row: 0 after the first classes.

    Shapes:
      returns: [vocab]
    """
    count = classes or vocab
    share = tf.constant(smooth / count, dtype)
    return tf.where(tf.range(vocab) < count, share, tf.zeros_like(share))


def _exponentials(logits: tf.Tensor, *bias: tf.Tensor) -> Any:
    wide = widen(logits)
    for b in bias:
        wide += tf.cast(b, wide.dtype)
    top = tf.reduce_max(wide, 1, keepdims=True)
    e = tf.exp(wide - top)
    return tf.cast(e, logits.dtype), top, tf.reduce_sum(e, 1, keepdims=True)


def _row_factors(dloss: tf.Tensor, total: tf.Tensor, x: tf.Tensor, *, keep: float) -> Any:
    d = tf.expand_dims(dloss, 1)
    weight = tf.cast(d / total, x.dtype)
    return weight, x * weight, x * tf.cast(-keep * d, x.dtype)


def _input_gradient(
    expected: tf.Tensor, weight: tf.Tensor, rows: tf.Tensor, dloss: tf.Tensor, *, keep: float
) -> tf.Tensor:
    return expected * weight - rows * tf.cast(keep * tf.expand_dims(dloss, 1), rows.dtype)
