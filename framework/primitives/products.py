"""The product of two matrices, in the form that is fastest on the CPU.

TensorFlow's product packs its operands differently from XLA's, and both differ from CPU to CPU. On
one core of a Zen 3 (AVX2), in float32, in GFLOP/s:

    [512, 2048] [2048, 512]          53, compiled by XLA 76
    [512, 2048] [512, 2048]^T        45, compiled by XLA 79
    [1024, 256]^T [1024, 1024]       38, transposed and then compiled by XLA 62
    [1024, 256] [256, 256]           67, compiled by XLA 61

On CPUs with AVX-512, and if an op uses several threads, XLA's product is not faster.
"""

from __future__ import annotations

import tensorflow as tf

from tekso.framework import cpu_features
from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion

_MIN_FLOPS = 1 << 28  # smaller products take a few milliseconds at most
_MIN_WEIGHT_DIM = 512  # of a matrix whose product with rows XLA computes faster
_MIN_GRADIENT_DIM = 256  # of a gradient of such a matrix


def product(
    a: tf.Tensor,
    b: tf.Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    batched: bool = False,
    fuse: Fuse = no_fusion,
) -> tf.Tensor:
    """Returns a b, the product of two matrices.

    Args:
      a: first matrix.
      b: second matrix.
      transpose_a: multiply the transposed first matrix.
      transpose_b: multiply the transposed second matrix; not both.
      batched: if the product is not compiled, compute it as a batch of one product. On CPU,
        TensorFlow's op for batches packs a matrix with very many rows or columns better.
      fuse: compiles elementwise clusters, and here products where that is faster.

    Shapes:
      a: [m, k], or [k, m] if it is transposed; b: [k, n], or [n, k] if it is transposed
      returns: [m, n]
    """
    compiles = _compiles(a, b, transpose_a, transpose_b, fuse)
    # XLA transposes a large matrix in half the time; within a product, it would pack it slowly.
    transposed = fuse(tf.transpose) if compiles else tf.transpose
    if transpose_a and (compiles or not batched) and _is_wider(a, b):
        # Packing a transposed first operand is slow, in XLA too, so it is the smaller one.
        return transposed(product(b, a, transpose_a=True, fuse=fuse))
    if compiles:
        return fuse(tf.matmul, transpose_b=transpose_b)(transposed(a) if transpose_a else a, b)
    if batched:
        a, b = tf.expand_dims(a, 0), tf.expand_dims(b, 0)
        y = tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=transpose_a, adj_y=transpose_b)
        return tf.squeeze(y, 0)
    return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def _is_wider(a: tf.Tensor, b: tf.Tensor) -> bool:
    """Returns whether a has more columns than b; False if unknown."""
    widths = a.shape[1], b.shape[1]
    return None not in widths and bool(widths[0] > widths[1])


def _compiles(a: tf.Tensor, b: tf.Tensor, transpose_a: bool, transpose_b: bool, fuse: Fuse) -> bool:
    """Returns whether XLA may compile a product, and computes one of these shapes faster."""
    if not (isinstance(fuse, XlaFusion) and a.dtype == tf.float32 and compiles_products()):
        return False
    if None in (*a.shape, *b.shape):
        return False
    k, m = a.shape if transpose_a else reversed(a.shape)
    n = b.shape[0 if transpose_b else 1]
    if 2 * m * k * n < _MIN_FLOPS:
        return False
    if not transpose_a:
        return bool(min(k, n) >= _MIN_WEIGHT_DIM)
    # The elements of a column share few sets of the cache if the width is a power of 2.
    smaller = min(m, n)
    return bool(smaller >= _MIN_GRADIENT_DIM and smaller & (smaller - 1) == 0)


def compiles_products() -> bool:
    """Returns whether XLA computes some products faster than TensorFlow in this process."""
    one_thread = tf.config.threading.get_intra_op_parallelism_threads() == 1
    return one_thread and cpu_features.has_only_avx2()
