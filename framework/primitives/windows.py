"""Convolution and pooling of images [batch, height, width, channels] with TensorFlow's kernels.

If TensorFlow's gradient is missing or wrong, the gradient is computed with slices and products (see
`window_slices`):

    convolution           TensorFlow's gradient on CPU (2.21)           gradient in this file
    ordinary              correct                                       TensorFlow's
    1x1 with strides      oneDNN: wrong, and writes out of bounds       by slices
    grouped or dilated    missing; with oneDNN only for float32         TensorFlow's if available
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework import onednn
from tekso.framework.primitives import window_slices
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen

Padding = Literal["SAME", "VALID", "FIXED"]
"""SAME: inputs / stride outputs, rounded up, with zero padding; VALID: windows inside the image;
FIXED: as many outputs as SAME, but with (window - 1) / 2 zeros before the image, for any size and
stride (PyTorch's padding). With stride 1, SAME and FIXED are equal."""


class Window(NamedTuple):
    """Shape, strides, dilations and padding of a window over height and width."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    padding: Padding

    def output_size(self, size: int, d: int) -> int:
        """Returns the number of windows along height (d = 0) or width (d = 1).

        Raises:
          ValueError: the window is larger than the image, with padding VALID.
        """
        stride, reach = self.strides[d], (self.shape[d] - 1) * self.dilations[d] + 1
        if self.padding != "VALID":
            return -(-size // stride)
        if size < reach:
            raise ValueError(
                f"a window of {reach} ({self.shape[d]}, dilated by {self.dilations[d]}) does not "
                f"fit in {('height', 'width')[d]} {size} with padding VALID; use SAME or a larger "
                "input"
            )
        return (size - reach) // stride + 1

    def pads(self, size: int, d: int) -> tuple[int, int]:
        """Returns the number of zeros before and after height (d = 0) or width (d = 1)."""
        stride, reach = self.strides[d], (self.shape[d] - 1) * self.dilations[d] + 1
        missing = max((self.output_size(size, d) - 1) * stride + reach - size, 0)
        if self.padding == "FIXED":
            before = (reach - 1) // 2
            return before, max(missing - before, 0)
        return missing // 2, missing - missing // 2


def convolution(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
) -> tf.Tensor:
    """Convolves images; the convolution is grouped if w has fewer inputs than x has channels.

    Shapes:
      x: [batch, height, width, channels], w: [*window.shape, channels / groups, outputs]
      b: [outputs]
      returns: [batch, new height, new width, outputs]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    if _sums_in_16_bits(x):
        args = (widen(x), widen(w), None if b is None else widen(b))
        return tf.cast(convolution(*args, window=window), x.dtype)
    _check_fits(x, window)
    x, window = _with_known_padding(x, window)
    # Dilation has no effect in a kernel dim of size 1.
    by_dim = [d if n > 1 else 1 for n, d in zip(window.shape, window.dilations, strict=True)]
    window = window._replace(dilations=(by_dim[0], by_dim[1]))
    if _has_gradient(x, w, window):
        y = _convolved(x, w, window)
    else:
        y = _convolved_with_gradient_by_slices(x, w, window)
    if b is None:
        return y
    groups = x.shape[3] // w.shape[2]
    return tf.nn.bias_add(y, b) if groups == 1 else _with_bias_of_groups(y, b, groups)


def depthwise_convolution(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
) -> tf.Tensor:
    """Convolves every channel with its own kernels.

    Shapes:
      x: [batch, height, width, channels], w: [*window.shape, channels, multiplier]
      b: [channels * multiplier]
      returns: [batch, new height, new width, channels * multiplier]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    if _sums_in_16_bits(x):
        args = (widen(x), widen(w), None if b is None else widen(b))
        return tf.cast(depthwise_convolution(*args, window=window), x.dtype)
    _check_fits(x, window)
    x, window = _with_known_padding(x, window)
    if window.dilations == (1, 1) and window.strides[0] == window.strides[1]:
        y = tf.nn.depthwise_conv2d(x, w, [1, *window.strides, 1], window.padding)
    else:
        # TensorFlow's kernel has one stride for both dims, and no strides with dilation. So compute
        # all windows with stride 1, and then select.
        y = tf.nn.depthwise_conv2d(
            _padded(x, window), w, [1, 1, 1, 1], "VALID", dilations=window.dilations
        )
        y = y[:, :: window.strides[0], :: window.strides[1]]
    return y if b is None else tf.nn.bias_add(y, b)


def average_pool(x: tf.Tensor, window: Window) -> tf.Tensor:
    """Returns the mean of every window, without the padding.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    if tf.as_dtype(x.dtype).size == 2:
        return tf.cast(average_pool(widen(x), window), x.dtype)
    _check_fits(x, window)
    window = _same_if_equal(x, window)
    if window.padding != "FIXED" and all(
        n <= size for n, size in zip(window.shape, x.shape[1:3], strict=True)
    ):
        return tf.nn.avg_pool2d(x, window.shape, window.strides, window.padding)
    # TensorFlow has no fixed padding here, and its gradient is wrong for windows larger than the
    # image (TensorFlow 2.21, CPU).
    counts = tf.constant(element_counts(x.shape[1], x.shape[2], window), x.dtype)
    sizes = (window.output_size(x.shape[1], 0), window.output_size(x.shape[2], 1))
    total = window_slices.window_sum(
        _padded(x, window), shape=window.shape, sizes=sizes, strides=window.strides
    )
    return total / counts


def max_pool(x: tf.Tensor, window: Window) -> tf.Tensor:
    """Returns the largest element of every window, without the padding.

    Shapes:
      x: [batch, height, width, channels]
      returns: [batch, new height, new width, channels]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    _check_fits(x, window)
    x, window = _with_known_padding(x, window, fill=float("-inf"))
    return tf.nn.max_pool2d(x, window.shape, window.strides, window.padding)


def element_counts(height: int, width: int, window: Window) -> np.ndarray:
    """Returns the number of image elements in every window: [1, new height, new width, 1]."""
    by_dim = []
    for d, size in enumerate((height, width)):
        before, after = window.pads(size, d)
        real = np.pad(np.ones(size), (before, after))
        starts = np.arange(window.output_size(size, d)) * window.strides[d]
        held = starts[:, None] + np.arange(window.shape[d])
        by_dim.append(real[held].sum(1))
    counts: np.ndarray = np.outer(*by_dim)[None, :, :, None]
    return counts


def _has_gradient(x: tf.Tensor, w: tf.Tensor, window: Window) -> bool:
    """Returns whether TensorFlow has a correct gradient for a convolution."""
    if window.shape == (1, 1) and window.strides != (1, 1):
        return False
    if window.dilations == (1, 1) and w.shape[2] == x.shape[3]:
        return True
    if _has_accelerator():
        return True
    return x.dtype == tf.float32 and onednn.is_enabled()


def _has_accelerator() -> bool:
    return any(tf.config.get_visible_devices(kind) for kind in ("GPU", "TPU"))


def _sums_in_16_bits(x: tf.Tensor) -> bool:
    """Returns whether TensorFlow's kernels would sum gradients in 16 bits: those for CPU do."""
    return tf.as_dtype(x.dtype).size == 2 and not _has_accelerator()


def _convolved(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    return tf.nn.conv2d(x, w, window.strides, window.padding, dilations=window.dilations)


def _convolved_with_gradient_by_slices(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    @custom_gradient
    def run(x: tf.Tensor, w: tf.Tensor) -> Any:
        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = _convolved_by_slices(x, w, window)
            gradients: list[tf.Tensor] = tape.gradient(y, [x, w], dy)
            return gradients

        return _convolved(x, w, window), grad

    return run(tf.convert_to_tensor(x), tf.convert_to_tensor(w))


def _with_bias_of_groups(y: tf.Tensor, b: tf.Tensor, groups: int) -> tf.Tensor:
    # Not bias_add: TensorFlow would fuse it with the convolution, and without oneDNN there is no
    # such kernel on CPU. An exported graph may run there.
    blocks = tf.reshape(y, [*window_slices.dims(y)[:3], groups, y.shape[3] // groups])
    return tf.reshape(blocks + tf.reshape(b, [groups, -1]), window_slices.dims(y))


def _convolved_by_slices(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    form = functools.partial(
        window_slices.convolution,
        sizes=(window.output_size(x.shape[1], 0), window.output_size(x.shape[2], 1)),
        strides=window.strides,
        dilations=window.dilations,
    )
    groups = x.shape[3] // w.shape[2]
    x = _padded(x, window)
    if groups == 1:
        return form(x, w)
    x = tf.reshape(x, [*window_slices.dims(x)[:3], groups, w.shape[2]])
    w = tf.reshape(w, [*w.shape[:3], groups, w.shape[3] // groups])
    y = form(tf.transpose(x, [3, 0, 1, 2, 4]), tf.transpose(w, [3, 0, 1, 2, 4]))
    y = tf.transpose(y, [1, 2, 3, 0, 4])
    return tf.reshape(y, [*window_slices.dims(y)[:3], groups * w.shape[4]])


def _check_fits(x: tf.Tensor, window: Window) -> None:
    for d in (0, 1):
        window.output_size(x.shape[1 + d], d)


def _same_if_equal(x: tf.Tensor, window: Window) -> Window:
    """Returns the window with padding SAME instead of FIXED if both pad this image equally."""
    same = window._replace(padding="SAME")
    is_equal = all(window.pads(x.shape[1 + d], d) == same.pads(x.shape[1 + d], d) for d in (0, 1))
    return same if is_equal and window.padding == "FIXED" else window


def _with_known_padding(
    x: tf.Tensor, window: Window, fill: float = 0.0
) -> tuple[tf.Tensor, Window]:
    """Returns image and window with a padding that TensorFlow's kernels have."""
    window = _same_if_equal(x, window)
    if window.padding != "FIXED":
        return x, window
    return _padded(x, window, fill), window._replace(padding="VALID")


def _padded(x: tf.Tensor, window: Window, fill: float = 0.0) -> tf.Tensor:
    pads = [window.pads(x.shape[1 + d], d) for d in (0, 1)]
    if not any(map(any, pads)):
        return x
    return tf.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)
