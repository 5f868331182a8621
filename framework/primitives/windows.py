"""Convolution and pooling of images and volumes with TensorFlow's kernels.

Images are [batch, height, width, channels], volumes [batch, depth, height, width, channels]. If
TensorFlow's gradient is missing or wrong, the gradient is computed with slices and products (see
`window_slices`):

    convolution           TensorFlow's gradient on CPU (2.21)           gradient in this file
    ordinary              correct                                       TensorFlow's
    1x1 with strides      oneDNN: wrong, and writes out of bounds       by slices
    grouped or dilated    missing; with oneDNN only for float32         TensorFlow's if available

With oneDNN, convolutions of small images with large weights are matrix products (see
`window_products`), which are faster.

Of volumes, only ordinary convolutions use kernels; grouped, dilated and depthwise ones and pooling
are computed with slices in both passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework import onednn
from tekso.framework.primitives import window_products, window_slices
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen

Padding = Literal["SAME", "VALID", "FIXED"]
"""SAME: inputs / stride outputs, rounded up, with zero padding; VALID: windows inside the image;
FIXED: as many outputs as SAME, but with (window - 1) / 2 zeros before the image, for any size and
stride (PyTorch's padding). With stride 1, SAME and FIXED are equal."""


_SPATIAL = ("depth", "height", "width")


def spatial_dims(count: int) -> tuple[str, ...]:
    """Returns the names of the spatial dims: height and width of images, and depth of volumes."""
    return _SPATIAL[-count:]


def image_dims(rank: int) -> tuple[str, ...]:
    """Returns the dimension names of images (rank 4) or volumes (rank 5)."""
    return ("batch", *spatial_dims(rank - 2), "channels")


class Window(NamedTuple):
    """Shape, strides, dilations and padding of a window over the spatial dims.

    There are two of them, height and width, or three: depth, height and width.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: Padding

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Names of the spatial dims."""
        return spatial_dims(len(self.shape))

    def output_size(self, size: int, d: int) -> int:
        """Returns the number of windows along spatial dim d.

        Raises:
          ValueError: the window is larger than the image, with padding VALID.
        """
        stride, reach = self.strides[d], (self.shape[d] - 1) * self.dilations[d] + 1
        if self.padding != "VALID":
            return -(-size // stride)
        if size < reach:
            raise ValueError(
                f"a window of {reach} ({self.shape[d]}, dilated by {self.dilations[d]}) does not "
                f"fit in {self.dim_names[d]} {size} with padding VALID; use SAME or a larger "
                "input"
            )
        return (size - reach) // stride + 1

    def pads(self, size: int, d: int) -> tuple[int, int]:
        """Returns the number of zeros before and after spatial dim d."""
        stride, reach = self.strides[d], (self.shape[d] - 1) * self.dilations[d] + 1
        missing = max((self.output_size(size, d) - 1) * stride + reach - size, 0)
        if self.padding == "FIXED":
            before = (reach - 1) // 2
            return before, max(missing - before, 0)
        return missing // 2, missing - missing // 2

    def output_sizes(self, x: tf.Tensor) -> tuple[int, ...]:
        """Returns the number of windows along every spatial dim of images or volumes."""
        return tuple(self.output_size(x.shape[1 + d], d) for d in range(len(self.shape)))


def convolution(
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    window: Window,
    may_multiply: bool = False,
) -> tf.Tensor:
    """Convolves images; the convolution is grouped if w has fewer inputs than x has channels.

    Args:
      x: the images.
      w: the weights.
      b: the bias.
      window: the window.
      may_multiply: whether small images may be convolved by matrix products (see
        `window_products`). Not on a mesh, since rows are examples and positions; nor in exported
        graphs, since other runtimes know convolutions.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      w: [*window.shape, channels / groups, outputs], b: [outputs]
      returns: [batch, *window.output_sizes(x), outputs]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    if _sums_in_16_bits(x):
        args = (widen(x), widen(w), None if b is None else widen(b))
        return tf.cast(convolution(*args, window=window, may_multiply=may_multiply), x.dtype)
    _check_fits(x, window)
    if may_multiply and _is_faster_by_products(x, w, window):
        y = _by_products(x, w, window)
        return y if b is None else tf.nn.bias_add(y, b)
    x, window = _with_known_padding(x, window)
    # Dilation has no effect in a kernel dim of size 1.
    by_dim = [d if n > 1 else 1 for n, d in zip(window.shape, window.dilations, strict=True)]
    window = window._replace(dilations=tuple(by_dim))
    if len(x.shape) == 4 and x.shape[2] == window.shape[1] == 1:
        return _convolved_as_rows(x, w, b, window)
    return _convolved_with_bias(x, w, b, window)


def depthwise_convolution(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window
) -> tf.Tensor:
    """Convolves every channel with its own kernels.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      w: [*window.shape, channels, multiplier], b: [channels * multiplier]
      returns: [batch, *window.output_sizes(x), channels * multiplier]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    if _sums_in_16_bits(x):
        args = (widen(x), widen(w), None if b is None else widen(b))
        return tf.cast(depthwise_convolution(*args, window=window), x.dtype)
    _check_fits(x, window)
    x, window = _with_known_padding(x, window)
    if len(x.shape) != 4:
        y = window_slices.depthwise_convolution(
            _padded(x, window),
            w,
            sizes=window.output_sizes(x),
            strides=window.strides,
            dilations=window.dilations,
        )
    elif window.dilations == (1, 1) and window.strides[0] == window.strides[1]:
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
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      returns: [batch, *window.output_sizes(x), channels]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    if tf.as_dtype(x.dtype).size == 2:
        return tf.cast(average_pool(widen(x), window), x.dtype)
    _check_fits(x, window)
    window = _same_if_equal(x, window)
    is_inside = all(n <= size for n, size in zip(window.shape, x.shape[1:-1], strict=True))
    if len(x.shape) == 4 and window.padding != "FIXED" and is_inside:
        return tf.nn.avg_pool2d(x, window.shape, window.strides, window.padding)
    # TensorFlow has no fixed padding here, and its gradient is wrong for windows larger than the
    # image (TensorFlow 2.21, CPU).
    counts = tf.constant(element_counts(x.shape[1:-1], window), x.dtype)
    total = window_slices.window_sum(
        _padded(x, window),
        shape=window.shape,
        sizes=window.output_sizes(x),
        strides=window.strides,
    )
    return total / counts


def max_pool(x: tf.Tensor, window: Window, *, by_edges: bool = False) -> tf.Tensor:
    """Returns the largest element of every window, without the padding.

    Args:
      x: the images.
      window: the window.
      by_edges: whether FIXED padding repeats the edges of images, which does not change the result,
        instead of -inf. In exported graphs: int8 cannot represent -inf beside other numbers.

    Shapes:
      x: [batch, height, width, channels] or [batch, depth, height, width, channels]
      returns: [batch, *window.output_sizes(x), channels]
    Raises:
      ValueError: the window is larger than the image, with padding VALID.
    """
    _check_fits(x, window)
    if len(x.shape) != 4:
        return window_slices.window_max(
            _padded(x, window, float("-inf")),
            shape=window.shape,
            sizes=window.output_sizes(x),
            strides=window.strides,
        )
    if by_edges and _same_if_equal(x, window).padding == "FIXED":
        x, window = _with_edges(x, window), window._replace(padding="VALID")
    x, window = _with_known_padding(x, window, fill=float("-inf"))
    return tf.nn.max_pool2d(x, window.shape, window.strides, window.padding)


def element_counts(sizes: Sequence[int], window: Window) -> np.ndarray:
    """Returns the number of elements of an image in every window.

    Shapes:
      sizes: the spatial dims of the image
      returns: [1, *output sizes, 1]
    """
    counts = np.ones(())
    for d, size in enumerate(sizes):
        before, after = window.pads(size, d)
        real = np.pad(np.ones(size), (before, after))
        starts = np.arange(window.output_size(size, d)) * window.strides[d]
        held = starts[:, None] + np.arange(window.shape[d])
        counts = counts[..., None] * real[held].sum(1)
    found: np.ndarray = counts[None, ..., None]
    return found


def _has_kernel(x: tf.Tensor, w: tf.Tensor, window: Window) -> bool:
    """Returns whether TensorFlow has a kernel for a convolution."""
    return len(x.shape) == 4 or (set(window.dilations) == {1} and w.shape[-2] == x.shape[-1])


def _has_gradient(x: tf.Tensor, w: tf.Tensor, window: Window) -> bool:
    """Returns whether TensorFlow has a correct gradient for a convolution."""
    if set(window.shape) == {1} and set(window.strides) != {1}:
        return False
    if set(window.dilations) == {1} and w.shape[-2] == x.shape[-1]:
        return True
    if _has_accelerator():
        return True
    return x.dtype == tf.float32 and onednn.is_enabled()


def _has_accelerator() -> bool:
    return any(tf.config.get_visible_devices(kind) for kind in ("GPU", "TPU"))


def _is_faster_by_products(x: tf.Tensor, w: tf.Tensor, window: Window) -> bool:
    if w.shape[-2] != x.shape[-1] or _has_accelerator() or not onednn.is_enabled():
        return False
    return window_products.is_faster(w, window.output_sizes(x))


def _by_products(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    return window_products.convolution(
        x,
        w,
        outputs=window.output_sizes(x),
        before=[window.pads(size, d)[0] for d, size in enumerate(x.shape[1:-1])],
        strides=window.strides,
        dilations=window.dilations,
    )


def _sums_in_16_bits(x: tf.Tensor) -> bool:
    """Returns whether TensorFlow's kernels would sum gradients in 16 bits: those for CPU do."""
    return tf.as_dtype(x.dtype).size == 2 and not _has_accelerator()


def _convolved_as_rows(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None, window: Window
) -> tf.Tensor:
    """Convolves images of width 1, such as sequences, as images of height 1.

    oneDNN computes several outputs of one row at once: with 256 channels, a kernel of 3 elements
    and a length of 200, the gradient of the weights takes less than half the time.
    """
    shape, strides, dilations = window.shape[::-1], window.strides[::-1], window.dilations[::-1]
    turned = Window(shape, strides, dilations, window.padding)
    x = tf.reshape(x, [-1, 1, *x.shape[1::2]])
    w = tf.reshape(w, [1, *w.shape[:1], *w.shape[2:]])
    y = _convolved_with_bias(x, w, b, turned)
    return tf.reshape(y, [-1, y.shape[2], 1, y.shape[3]])


def _convolved_with_bias(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None, window: Window
) -> tf.Tensor:
    if not _has_kernel(x, w, window):
        y = _convolved_by_slices(x, w, window)
    elif _has_gradient(x, w, window):
        y = _convolved(x, w, window)
    else:
        y = _convolved_with_gradient_by_slices(x, w, window)
    if b is None:
        return y
    groups = x.shape[-1] // w.shape[-2]
    return tf.nn.bias_add(y, b) if groups == 1 else _with_bias_of_groups(y, b, groups)


def _convolved(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    if len(x.shape) == 5:
        return tf.nn.conv3d(x, w, [1, *window.strides, 1], window.padding)
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
    blocks = tf.reshape(y, [*window_slices.dims(y)[:-1], groups, y.shape[-1] // groups])
    return tf.reshape(blocks + tf.reshape(b, [groups, -1]), window_slices.dims(y))


def _convolved_by_slices(x: tf.Tensor, w: tf.Tensor, window: Window) -> tf.Tensor:
    return window_slices.grouped_convolution(
        _padded(x, window),
        w,
        sizes=window.output_sizes(x),
        strides=window.strides,
        dilations=window.dilations,
    )


def _check_fits(x: tf.Tensor, window: Window) -> None:
    window.output_sizes(x)


def _same_if_equal(x: tf.Tensor, window: Window) -> Window:
    """Returns the window with padding SAME instead of FIXED if both pad this image equally."""
    same = window._replace(padding="SAME")
    sizes = list(enumerate(x.shape[1:-1]))
    is_equal = all(window.pads(size, d) == same.pads(size, d) for d, size in sizes)
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
    pads = [window.pads(size, d) for d, size in enumerate(x.shape[1:-1])]
    if not any(map(any, pads)):
        return x
    return tf.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)


def _with_edges(x: tf.Tensor, window: Window) -> tf.Tensor:
    """Returns images padded by their first and last rows and columns."""
    for d, size in enumerate(x.shape[1:-1]):
        before, after = window.pads(size, d)
        first, last = tf.gather(x, [0], axis=1 + d), tf.gather(x, [size - 1], axis=1 + d)
        x = tf.concat([first] * before + [x] + [last] * after, 1 + d) if before + after else x
    return x
