"""Projection: contraction of x with a weight matrix, with the fastest form of its gradients."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.products import product


def project(
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    num_contracted: int = 1,
    fuse: Fuse = no_fusion,
) -> tf.Tensor:
    """Contracts the last `num_contracted` dims of x with the first dims of w, and adds b.

    Shapes:
      x: [..., *inner], w: [*inner, *outer], b: [*outer]
      returns: [..., *outer]
    Raises:
      ValueError: the inner dims of x and w differ, or the number of dims of x is unknown.
    """
    x, w = tf.convert_to_tensor(x), tf.convert_to_tensor(w)  # a notebook may pass NumPy arrays
    if x.shape.rank is None:
        raise ValueError(
            "project: the number of dims of x is unknown, as after tf.numpy_function: give x its "
            f"shape, as in tf.ensure_shape(x, [None, {w.shape[0]}])"
        )
    inner, outer = w.shape[:num_contracted], w.shape[num_contracted:]
    if x.shape[x.shape.rank - num_contracted :] != inner:
        raise ValueError(
            f"project: the last {num_contracted} dims of x {x.shape} are not the first dims of "
            f"w {w.shape}; the first dim of w is the input_dim of a layer such as Linear. Dim 0 of "
            "x may be below batch_size, because a step computes a batch in parts"
        )
    leading = x.shape[: x.shape.rank - num_contracted]
    k, n = math.prod(inner), math.prod(outer)
    args = [tf.reshape(x, [-1, k]), tf.reshape(w, [k, n])]
    if b is not None:
        args.append(tf.reshape(b, [n]))
    return tf.reshape(_matrix_project(fuse, *args), [*_static(leading), *outer])


def _static(shape: tf.TensorShape) -> list[int]:
    sizes = shape.as_list()
    return [-1 if n is None else n for n in sizes]


def _matrix_project(fuse: Fuse, *args: tf.Tensor) -> tf.Tensor:
    @custom_gradient
    def run(x: tf.Tensor, w: tf.Tensor, *b: tf.Tensor) -> Any:
        y = product(x, w, fuse=fuse)
        if b:
            y = tf.nn.bias_add(y, b[0])

        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            dx = product(dy, w, transpose_b=True, fuse=fuse)
            dw = product(x, dy, transpose_a=True, fuse=fuse)
            return [dx, dw, *(fuse(_column_sum)(dy) for _ in b)]

        return y, grad

    return run(*args)


def _column_sum(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_sum(widen(x), 0), x.dtype)
