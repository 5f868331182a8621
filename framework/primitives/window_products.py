"""Convolution of small images or volumes as matrix products: one for each element of the kernel.

An element of the kernel connects pairs of an input and an output position. Its product has a row
for each pair and example. Pairs with an input position in the padding are left out:

    positions   kernel element              pairs (input, output)
      0 1       centre                      (0, 0) (1, 1) (2, 2) (3, 3)
      2 3       right of the centre         (1, 0) (3, 2)
                below and right of it       (3, 0)

So a 3x3 convolution of 2x2 images needs 16 products of positions instead of 36.

oneDNN's convolutions multiply the outputs of one row of one image at a time with the weights. If
the rows are short and the weights do not fit in the cache of a core, most of the time they wait
for weights. Here, each weight is read once for all rows of all images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient

_MOST_OUTPUTS = 16
_FEWEST_CHANNELS = 128
_FEWEST_WEIGHTS = 1 << 19  # 2 MiB in float32


def is_faster(w: tf.Tensor, outputs: Sequence[int]) -> bool:
    """Returns whether the products are faster than TensorFlow's kernels with oneDNN.

    The limits are measured, with AVX-512 and 8 to 128 images: with 4 x 4 outputs, 3 x 3 elements
    and 256 channels the gain is 10 %; with 2 x 2 outputs and 512 channels, a factor of 4.

    Args:
      w: the weights, [*kernel, channels, outputs].
      outputs: the spatial sizes of the output.
    """
    is_small = math.prod(outputs) <= _MOST_OUTPUTS and math.prod(w.shape[:-2]) > 1
    is_large = min(w.shape[-2:]) >= _FEWEST_CHANNELS and math.prod(w.shape) >= _FEWEST_WEIGHTS
    return is_small and is_large


def convolution(
    x: tf.Tensor,
    w: tf.Tensor,
    *,
    outputs: tuple[int, ...],
    before: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tf.Tensor:
    """Convolves images or volumes.

    Args:
      x: the images.
      w: the weights.
      outputs: the spatial sizes of the output.
      before: the padding before the first element of every spatial dim.
      strides: the stride of every spatial dim.
      dilations: the dilation of every spatial dim.

    Shapes:
      x: [batch, *spatial, channels]
      w: [*kernel, channels, outputs]
      returns: [batch, *outputs, number of outputs]
    """
    spatial = tuple(x.shape[1:-1])
    steps = np.array([before, strides, dilations])[..., np.newaxis]
    pairs = _pairs(spatial, outputs, tuple(w.shape[:-2]), *steps)
    # The first one without pairs, if only padding is in the windows.
    used = [k for k, (sources, _) in enumerate(pairs) if len(sources)] or [0]
    counts = [len(pairs[k][0]) for k in used]
    sources, targets = (np.concatenate([pairs[k][i] for k in used]) for i in (0, 1))

    def taken(x: tf.Tensor, rows: np.ndarray) -> list[tf.Tensor]:
        """Returns the positions of the pairs of every element, [pairs * batch, channels] each."""
        parts = tf.split(tf.gather(_positions_first(x), rows), counts)
        return [tf.reshape(part, [-1, x.shape[-1]]) for part in parts]

    def added(parts: list[tf.Tensor], rows: np.ndarray, sizes: tuple[int, ...]) -> tf.Tensor:
        """Returns images: the sums of the rows of `taken` at every position."""
        batch = -1 if len(rows) else tf.shape(x)[0]  # -1 cannot be inferred of no rows
        y = tf.reshape(tf.concat(parts, 0), [len(rows), batch, parts[0].shape[-1]])
        return _images(tf.math.unsorted_segment_sum(y, rows, math.prod(sizes)), sizes)

    @custom_gradient
    def run(x: tf.Tensor, w: tf.Tensor) -> Any:
        elements = tf.unstack(tf.reshape(w, [-1, *w.shape[-2:]]))
        kernels = [elements[k] for k in used]
        of_pairs = zip(taken(x, sources), kernels, strict=True)
        y = added([tf.matmul(part, kernel) for part, kernel in of_pairs], targets, outputs)

        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            given, dw = taken(dy, targets), [tf.zeros_like(element) for element in elements]
            for k, part, d in zip(used, taken(x, sources), given, strict=True):
                dw[k] = tf.matmul(part, d, transpose_a=True)
            of_pairs = zip(given, kernels, strict=True)
            dx = [tf.matmul(d, kernel, transpose_b=True) for d, kernel in of_pairs]
            return [added(dx, sources, spatial), tf.reshape(tf.stack(dw), w.shape)]

        return y, grad

    return run(tf.convert_to_tensor(x), tf.convert_to_tensor(w))


def _pairs(
    spatial: tuple[int, ...],
    outputs: tuple[int, ...],
    kernel: tuple[int, ...],
    before: np.ndarray,
    strides: np.ndarray,
    dilations: np.ndarray,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each element of the kernel the input and the output positions that it connects.

    Positions are counted in row-major order.
    """
    starts = np.indices(outputs).reshape(len(spatial), -1) * strides - before
    found = []
    for element in np.ndindex(*kernel):
        at = starts + np.array(element)[:, None] * dilations
        inside = ((at >= 0) & (at < np.array(spatial)[:, None])).all(0)
        sources = np.ravel_multi_index(tuple(at[:, inside]), spatial)
        found.append((sources.astype(np.int32), np.flatnonzero(inside).astype(np.int32)))
    return found


def _positions_first(x: tf.Tensor) -> tf.Tensor:
    """Returns images as [positions, batch, channels]."""
    rank = x.shape.rank
    x = tf.transpose(x, [*range(1, rank - 1), 0, rank - 1])
    return tf.reshape(x, [math.prod(x.shape[: rank - 2]), -1, x.shape[-1]])


def _images(x: tf.Tensor, sizes: tuple[int, ...]) -> tf.Tensor:
    """Returns [positions, batch, channels] as images with these spatial sizes."""
    count = len(sizes)
    x = tf.reshape(x, [*sizes, -1, x.shape[-1]])
    return tf.transpose(x, [count, *range(count), count + 1])
