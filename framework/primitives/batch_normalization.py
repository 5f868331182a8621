"""Batch normalisation in training, with a gradient of two passes over the activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.precision import widen


class BatchNormed(NamedTuple):
    """The result of `ops.batch_norm`; see there."""

    y: tf.Tensor
    mean: tf.Tensor
    count: tf.Tensor
    total: tf.Tensor
    squares: tf.Tensor


def batch_norm(
    x: tf.Tensor,
    scale: tf.Tensor,
    bias: tf.Tensor,
    counted: tf.Tensor | None,
    *,
    epsilon: float,
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor],
    fuse: Fuse = no_fusion,
) -> BatchNormed:
    """See `ops.batch_norm`.

    With G = dy, n the count of all replicas and c the elements that count, the gradients are

        dx = scale * inverse * (G - c * (sum G + normalised * sum(G * normalised)) / n)

    with sums over all replicas, and sum(G * normalised) and sum G of this replica for scale and
    bias.

    Sums are taken over one dim after the other. One float32 sum of a million values would add them
    in a row: with a mean of a thousand deviations, the error would be larger than a deviation.
    """
    flags = [] if counted is None else [counted]
    wide = widen(x).dtype
    # In int64: in int32, the size of an x of 2**31 elements would be negative, without an error.
    size = tf.size(x, out_type=tf.int64)
    elements = size // x.shape[-1] if counted is None else tf.math.count_nonzero(counted)
    here = tf.cast(elements, wide)
    count = tf.maximum(sum_over_replicas(here), 1)

    @custom_gradient
    def run(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor) -> Any:
        total = _over_other_dims(fuse(_total)(x, *flags))
        mean = sum_over_replicas(total) / count
        squares = _over_other_dims(fuse(_squares)(x, mean, *flags))
        inverse = tf.math.rsqrt(sum_over_replicas(squares) / count + epsilon)
        factor = inverse * tf.cast(scale, wide)
        y = fuse(_normalised)(x, mean, factor, tf.cast(bias, wide))

        def grad(dy: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor]:
            dbias, dscale = map(_over_other_dims, fuse(_sums)(dy, x, mean, inverse))
            shares = [sum_over_replicas(s) / count for s in (dbias, dscale)]
            dx = fuse(_input_gradient)(dy, x, mean, inverse, factor, *shares, *flags)
            return [dx, tf.cast(dscale, scale.dtype), tf.cast(dbias, bias.dtype)]

        return (y, mean, total, squares), grad

    y, mean, total, squares = run(x, scale, bias)
    statistics = [tf.stop_gradient(value) for value in (mean, here, total, squares)]
    return BatchNormed(y, *statistics)


def _counted(x: tf.Tensor, flags: tuple[tf.Tensor, ...]) -> tf.Tensor:
    for flag in flags:
        x *= tf.cast(flag, x.dtype)
    return x


def _over_other_dims(sums: tf.Tensor) -> tf.Tensor:
    """Returns the sums over all dims but the last.

    It stays outside of compiled functions, because XLA would make one sum of all.
    """
    while sums.shape.rank > 1:
        sums = tf.reduce_sum(sums, -2)
    return sums


def _total(x: tf.Tensor, *flags: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(_counted(widen(x), flags), -2)


def _squares(x: tf.Tensor, mean: tf.Tensor, *flags: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(_counted(tf.square(widen(x) - mean), flags), -2)


def _normalised(x: tf.Tensor, mean: tf.Tensor, factor: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    return tf.cast((widen(x) - mean) * factor + bias, x.dtype)


def _sums(dy: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor) -> Any:
    wide = widen(dy)
    return tf.reduce_sum(wide, -2), tf.reduce_sum(wide * (widen(x) - mean), -2) * inverse


def _input_gradient(
    dy: tf.Tensor,
    x: tf.Tensor,
    mean: tf.Tensor,
    inverse: tf.Tensor,
    factor: tf.Tensor,
    dbias: tf.Tensor,
    dscale: tf.Tensor,
    *flags: tf.Tensor,
) -> tf.Tensor:
    of_statistics = _counted(dbias + (widen(x) - mean) * (inverse * dscale), flags)
    return tf.cast((widen(dy) - of_statistics) * factor, dy.dtype)
