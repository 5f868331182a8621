"""Average pooling and depthwise convolution over [batch, height, width, channels].

Each in two forms. The direct one is TensorFlow's kernel with its gradient, which is 40 times faster
on CPU. The one by slices is a sum over the elements of the window, made of ops that can be laid out
on a device mesh, which TensorFlow's gradient kernels of these two cannot.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

Padding = Literal["SAME", "VALID"]
"""SAME: as many outputs as inputs / stride, zeros around; VALID: windows that lie inside only."""


class Window(NamedTuple):
    """How a window goes over height and width."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    padding: Padding

    def output_size(self, size: int, d: int) -> int:
        """Returns the number of windows along height (d = 0) or width (d = 1).

        Raises:
          ValueError: not even one window fits.
        """
        stride, reach = self.strides[d], (self.shape[d] - 1) * self.dilations[d] + 1
        if self.padding == "SAME":
            return -(-size // stride)
        if size < reach:
            raise ValueError(
                f"a window of {reach} ({self.shape[d]}, dilated by {self.dilations[d]}) does not "
                f"fit in {('height', 'width')[d]} {size} with padding VALID; use SAME or a larger "
                "input"
            )
        return (size - reach) // stride + 1

    def pads(self, size: int, d: int) -> tuple[int, int]:
        """Returns how many zeros go before and after height (d = 0) or width (d = 1)."""
        stride, reach = self.strides[d], (self.shape[d] - 1) * self.dilations[d] + 1
        missing = max((self.output_size(size, d) - 1) * stride + reach - size, 0)
        return missing // 2, missing - missing // 2


def average_pool(x: tf.Tensor, window: Window) -> tf.Tensor:
    """Returns the mean of every window; zeros of the padding are not counted.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]
    Raises:
      ValueError: not even one window fits.
    """
    _check_fits(x, window)
    if any(n > size for n, size in zip(window.shape, x.shape[1:3], strict=True)):
        # The kernel's gradient is wrong for a window larger than the image (TensorFlow 2.21, CPU).
        return average_pool_by_slices(x, window)
    return tf.nn.avg_pool2d(x, window.shape, window.strides, window.padding)


def average_pool_by_slices(x: tf.Tensor, window: Window) -> tf.Tensor:
    """As `average_pool`, for every execution."""
    total = tf.add_n([part for _, part in _slices(x, window)])
    return total / tf.constant(_counts(x.shape, window), x.dtype)


def depthwise_convolution(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    """Convolves every channel with kernels of its own.

    Shapes:
      x: [batch, height, width, channels], w: [*window.shape, channels, multiplier]
      returns: [batch, new height, new width, channels * multiplier]
    Raises:
      ValueError: not even one window fits.
    """
    _check_fits(x, window)
    if window.dilations == (1, 1) and window.strides[0] == window.strides[1]:
        return tf.nn.depthwise_conv2d(x, w, [1, *window.strides, 1], window.padding)
    # The kernel knows one stride for both dims, and none with dilation: all windows, then a choice.
    y = tf.nn.depthwise_conv2d(
        _padded(x, window), w, [1, 1, 1, 1], "VALID", dilations=window.dilations
    )
    return y[:, :: window.strides[0], :: window.strides[1]]


def depthwise_convolution_by_slices(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    """As `depthwise_convolution`, for every execution."""
    parts = [tf.expand_dims(part, -1) * w[i, j] for (i, j), part in _slices(x, window)]
    y = tf.add_n(parts)
    return tf.reshape(y, [*y.shape[:3], w.shape[2] * w.shape[3]])


def _check_fits(x: tf.Tensor, window: Window) -> None:
    for d in (0, 1):
        window.output_size(x.shape[1 + d], d)


def _padded(x: tf.Tensor, window: Window) -> tf.Tensor:
    pads = [window.pads(x.shape[1 + d], d) for d in (0, 1)]
    return tf.pad(x, [(0, 0), *pads, (0, 0)]) if any(map(any, pads)) else x


def _slices(x: tf.Tensor, window: Window) -> list[tuple[tuple[int, int], tf.Tensor]]:
    """Returns [((i, j), element i, j of every window)], each [batch, new h, new w, channels]."""
    sizes = [window.output_size(x.shape[1 + d], d) for d in (0, 1)]
    padded = _padded(x, window)
    parts = []
    for i in range(window.shape[0]):
        for j in range(window.shape[1]):
            rows, columns = (
                slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
                for at, dilation, size, stride in zip(
                    (i, j), window.dilations, sizes, window.strides, strict=True
                )
            )
            parts.append(((i, j), padded[:, rows, columns]))
    return parts


def _counts(shape: tf.TensorShape, window: Window) -> np.ndarray:
    """Returns how many elements of x every window holds: [1, new height, new width, 1]."""
    by_dim = []
    for d, size in enumerate(shape[1:3]):
        before, after = window.pads(size, d)
        real = np.pad(np.ones(size), (before, after))
        starts = np.arange(window.output_size(size, d)) * window.strides[d]
        held = starts[:, None] + np.arange(window.shape[d])
        by_dim.append(real[held].sum(1))
    return np.outer(*by_dim)[None, :, :, None]
