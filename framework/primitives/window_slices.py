"""Convolution and pooling as slices, sums and products, over any number of outer dims.

They support cases that TensorFlow's kernels or their gradients do not: dims sharded over a device
mesh, several batch dims, windows larger than the image. A window is applied to one dim after the
other, so its k x l elements need k + l slices (l + k l in a depthwise convolution). There is no
padding: all windows must be inside of x [*outer, *spatial, channels]. The spatial dims are height
and width, or depth, height and width; all other dims may be sharded.

    height 7, window 3, stride 2, 3 windows      element 0:  0 . 2 . 4 . .
                                                 element 1:  . 1 . 3 . 5 .
                                                 element 2:  . . 2 . 4 . 6
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient

Sizes = tuple[int, ...]

_MOST_DIMS = 7  # of TensorFlow's slice


def elements(
    x: tf.Tensor, axis: int, *, count: int, size: int, stride: int = 1, dilation: int = 1
) -> list[tf.Tensor]:
    """Returns a list: element 0, 1, …, `count` - 1 of every window along a dim.

    It uses only slices with step 1. Their gradient is a pad, which is 40 times faster than the
    gradient of strided slices.

    Args:
      x: the tensor.
      axis: the dim.
      count: number of elements in a window.
      size: number of windows.
      stride: distance between windows.
      dilation: distance between the elements of a window.
    """
    if stride == 1:
        return [sliced(x, axis, k * dilation, size) for k in range(count)]
    reach = (count - 1) * dilation + (size - 1) * stride + 1
    blocks = -(-reach // stride)
    x = sliced(x, axis, 0, min(blocks * stride, x.shape[axis]))
    if missing := blocks * stride - x.shape[axis]:
        x = tf.pad(x, [(0, missing if d == axis else 0) for d in range(x.shape.rank)])
    known = dims(x)
    x = tf.reshape(x, [*known[:axis], blocks, stride, *known[axis + 1 :]])
    found = []
    for k in range(count):
        block, phase = divmod(k * dilation, stride)
        part = sliced(sliced(x, axis + 1, phase, 1), axis, block, size)
        found.append(tf.squeeze(part, [axis + 1]))
    return found


def sliced(x: tf.Tensor, axis: int, start: int, size: int) -> tf.Tensor:
    """Returns `size` elements of a dim from `start` on."""
    if start == 0 and size == x.shape[axis]:
        return x
    if x.shape.rank > _MOST_DIMS:
        parts = [start, size, x.shape[axis] - start - size]
        return tf.split(x, parts, axis)[1]
    begin, sizes = [0] * x.shape.rank, dims(x)
    begin[axis], sizes[axis] = start, size
    return tf.slice(x, begin, sizes)


def dims(x: tf.Tensor) -> list[int]:
    """Returns the sizes of the dims; -1 for unknown sizes, such as the batch."""
    return [-1 if size is None else size for size in x.shape]


def convolution(
    x: tf.Tensor, w: tf.Tensor, *, sizes: Sizes, strides: Sizes, dilations: Sizes
) -> tf.Tensor:
    """Returns the convolution of x with w: each output is a sum over its window and all channels.

    If w has leading block dims, x must have them too, and each block has its own weights.

    Shapes:
      x: [*blocks, *outer, *spatial, channels]
      w: [*blocks, *kernel, channels, outputs]; kernel has as many dims as `sizes`
      returns: [*blocks, *outer, *sizes, outputs]
    """
    count = len(sizes)
    at, num_blocks = x.shape.rank - count - 1, w.shape.rank - count - 2
    outer, spatial = "abcdefgh"[:at], "xyz"[:count]
    equation = f"{outer}{spatial}k,{outer[:num_blocks]}ko->{outer}{spatial}o"

    def forward(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        # Concatenate the elements of a window row along channels; then one product per window row.
        # A row is along the last spatial dim.
        kernel, last = w.shape[num_blocks : num_blocks + count], count - 1
        x = _side_by_side(
            x,
            at + last,
            count=kernel[last],
            size=sizes[last],
            stride=strides[last],
            dilation=dilations[last],
        )
        w = tf.reshape(
            w, [*w.shape[:num_blocks], math.prod(kernel[:last]), x.shape[-1], w.shape[-1]]
        )
        parts = [x]
        for d in range(last):
            parts = [
                element
                for part in parts
                for element in elements(
                    part,
                    at + d,
                    count=kernel[d],
                    size=sizes[d],
                    stride=strides[d],
                    dilation=dilations[d],
                )
            ]
        kernels = tf.unstack(w, axis=num_blocks)
        return tf.add_n(
            [tf.einsum(equation, part, k) for part, k in zip(parts, kernels, strict=True)]
        )

    @custom_gradient
    def run(x: tf.Tensor, w: tf.Tensor) -> Any:
        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            # Slices are recomputed: saved, they would be as large as x times a window's elements.
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = forward(x, w)
            gradients: list[tf.Tensor] = tape.gradient(y, [x, w], dy)
            return gradients

        return forward(x, w), grad

    return run(x, w)


def grouped_convolution(
    x: tf.Tensor, w: tf.Tensor, *, sizes: Sizes, strides: Sizes, dilations: Sizes
) -> tf.Tensor:
    """Returns the convolution of x with w, grouped if w has fewer inputs than x has channels.

    Shapes:
      x: [batch, *spatial, channels]
      w: [*kernel, channels / groups, outputs]; kernel has as many dims as `sizes`
      returns: [batch, *sizes, outputs]
    """
    groups = x.shape[-1] // w.shape[-2]
    if groups == 1:
        return convolution(x, w, sizes=sizes, strides=strides, dilations=dilations)
    x = _to_front(tf.reshape(x, [*dims(x)[:-1], groups, w.shape[-2]]), -2)
    w = _to_front(tf.reshape(w, [*w.shape[:-1], groups, w.shape[-1] // groups]), -2)
    y = convolution(x, w, sizes=sizes, strides=strides, dilations=dilations)
    y = tf.transpose(y, [*range(1, y.shape.rank - 1), 0, y.shape.rank - 1])
    return tf.reshape(y, [*dims(y)[:-2], groups * y.shape[-1]])


def _to_front(x: tf.Tensor, axis: int) -> tf.Tensor:
    order = list(range(len(x.shape)))
    return tf.transpose(x, [order.pop(axis), *order])


def _side_by_side(x: tf.Tensor, axis: int, **window: int) -> tf.Tensor:
    parts = elements(x, axis, **window)
    return tf.concat(parts, x.shape.rank - 1) if len(parts) > 1 else parts[0]


def depthwise_convolution(
    x: tf.Tensor, w: tf.Tensor, *, sizes: Sizes, strides: Sizes, dilations: Sizes
) -> tf.Tensor:
    """Convolves every channel with its own kernels.

    Shapes:
      x: [*outer, *spatial, channels]
      w: [*kernel, channels, multiplier]; kernel has as many dims as `sizes`
      returns: [*outer, *sizes, channels * multiplier]
    """
    kernel = w.shape[: len(sizes)].as_list()
    at = x.shape.rank - len(sizes) - 1
    parts: list[tuple[tuple[int, ...], tf.Tensor]] = [((), x)]
    for d in reversed(range(len(sizes))):
        options = {"size": sizes[d], "stride": strides[d], "dilation": dilations[d]}
        parts = [
            ((i, *place), element)
            for place, part in parts
            for i, element in enumerate(elements(part, at + d, count=kernel[d], **options))
        ]
    products = []
    for place, part in parts:
        one = w
        for d, i in enumerate(place):
            one = sliced(one, d, i, 1)
        one = tf.squeeze(one, list(range(len(sizes))))
        products.append(tf.expand_dims(part, -1) * one)
    y = tf.add_n(products)
    return tf.reshape(y, [*y.shape[:-2], y.shape[-2] * y.shape[-1]])


def window_sum(x: tf.Tensor, *, shape: Sizes, sizes: Sizes, strides: Sizes) -> tf.Tensor:
    """Returns the sum of every window.

    Shapes:
      x: [*outer, *spatial, channels]
      returns: [*outer, *sizes, channels]
    """
    for axis in reversed(range(len(sizes))):
        at = x.shape.rank - len(sizes) - 1 + axis
        x = tf.add_n(elements(x, at, count=shape[axis], size=sizes[axis], stride=strides[axis]))
    return x


def window_max(x: tf.Tensor, *, shape: Sizes, sizes: Sizes, strides: Sizes) -> tf.Tensor:
    """Returns the largest element of every window.

    Of equal elements, the first in row-major order gets the gradient.

    Shapes:
      x: [*outer, *spatial, channels]
      returns: [*outer, *sizes, channels]
    """
    for axis in reversed(range(len(sizes))):
        at = x.shape.rank - len(sizes) - 1 + axis
        parts = elements(x, at, count=shape[axis], size=sizes[axis], stride=strides[axis])
        x = _first_max(parts) if len(parts) > 1 else parts[0]
    return x


def _first_max(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    @custom_gradient
    def run(*parts: tf.Tensor) -> Any:
        y = parts[0]
        for part in parts[1:]:
            y = tf.maximum(y, part)

        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            left, zero, gradients = dy, tf.zeros_like(dy), []
            for part in parts:
                largest = tf.equal(part, y)
                gradients.append(tf.where(largest, left, zero))
                left = tf.where(largest, zero, left)
            return gradients

        return y, grad

    return run(*parts)
