"""Convolution and pooling: the direct forms and those by slices against loops in NumPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives import window_slices, windows
from tekso.framework.primitives.windows import Padding, Window

WINDOWS = {
    "2x2 stride 2": Window((2, 2), (2, 2), (1, 1), "SAME"),
    "3x3": Window((3, 3), (1, 1), (1, 1), "SAME"),
    "3x2 stride 2": Window((3, 2), (2, 2), (1, 1), "SAME"),
    "3x2 strides 2, 1": Window((3, 2), (2, 1), (1, 1), "SAME"),
    "2x3 valid": Window((2, 3), (1, 1), (1, 1), "VALID"),
    "3x3 valid stride 2": Window((3, 3), (2, 2), (1, 1), "VALID"),
    "wider than the image": Window((9, 3), (1, 1), (1, 1), "SAME"),
}
DILATED = {
    "dilated": Window((3, 3), (1, 1), (2, 2), "SAME"),
    "dilated 1, 2 valid": Window((3, 2), (1, 1), (1, 2), "VALID"),
    "dilated with stride": Window((3, 3), (2, 2), (2, 2), "SAME"),
    "dilated with strides": Window((2, 3), (2, 1), (2, 1), "SAME"),
}

COLUMNS = {
    "column": Window((3, 1), (1, 1), (1, 1), "SAME"),
    "column dilated with stride": Window((3, 1), (2, 1), (2, 1), "VALID"),
    "column with strides": Window((2, 1), (2, 3), (1, 2), "SAME"),
}


def taken(x: np.ndarray, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Returns what every window holds, and whether it is of the image.

    Shapes:
      returns: [B, new H, new W, window H, window W, C] and the same without B and C
    """
    sizes, starts = [], []
    for d in (0, 1):
        size, stride, dilation = x.shape[1 + d], window.strides[d], window.dilations[d]
        reach = dilation * (window.shape[d] - 1) + 1
        if window.padding == "SAME":
            count = int(np.ceil(size / stride))
            before = max((count - 1) * stride + reach - size, 0) // 2
        else:
            count, before = int(np.ceil((size - reach + 1) / stride)), 0
        sizes.append(count)
        starts.append(before)
    out = np.zeros((x.shape[0], *sizes, *window.shape, x.shape[3]))
    real = np.zeros((*sizes, *window.shape), bool)
    for place in np.ndindex(*real.shape):
        at = [
            place[d] * window.strides[d] - starts[d] + place[2 + d] * window.dilations[d]
            for d in (0, 1)
        ]
        if all(0 <= at[d] < x.shape[1 + d] for d in (0, 1)):
            out[(slice(None), *place)] = x[:, at[0], at[1]]
            real[place] = True
    return out, real


def value_and_gradients(function: Any, *args: np.ndarray) -> list[np.ndarray]:
    tensors = [tf.constant(a) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        y = function(*tensors)
        loss = tf.reduce_sum(tf.sin(y))
    return [y.numpy(), *(g.numpy() for g in tape.gradient(loss, tensors))]


def by_slices(form: Any, x: tf.Tensor, window: Window, fill: float = 0.0) -> tf.Tensor:
    pads = [window.pads(x.shape[1 + d], d) for d in (0, 1)]
    sizes = tuple(window.output_size(x.shape[1 + d], d) for d in (0, 1))
    x = tf.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)
    return form(x, sizes=sizes, strides=window.strides)


@pytest.mark.parametrize("name", WINDOWS)
def test_average_pool_is_the_mean_of_what_lies_inside(name: str) -> None:
    window = WINDOWS[name]
    x = np.random.default_rng(0).normal(size=(2, 7, 6, 3))
    held, real = taken(x, window)
    expected = held.sum((3, 4)) / real.sum((2, 3))[None, ..., None]
    direct = value_and_gradients(lambda x: windows.average_pool(x, window), x)
    np.testing.assert_allclose(direct[0], expected, rtol=1e-12, atol=1e-14)
    if window.shape[0] <= x.shape[1]:
        form = functools.partial(window_slices.window_sum, shape=window.shape)
        sums = value_and_gradients(lambda x: by_slices(form, x, window), x)
        counts = windows.element_counts((7, 6), window)
        np.testing.assert_allclose(sums[0] / counts, direct[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", WINDOWS)
def test_max_pool_gives_its_gradient_to_the_first_of_the_largest(name: str) -> None:
    window = WINDOWS[name]
    x = np.random.default_rng(0).integers(-2, 2, size=(2, 7, 6, 3)).astype(float)  # many equals
    held, real = taken(x, window)
    held = np.where(real[None, ..., None], held, -np.inf)
    held = held.reshape(*held.shape[:3], -1, held.shape[-1])
    direct = value_and_gradients(lambda x: windows.max_pool(x, window), x)
    form = functools.partial(window_slices.window_max, shape=window.shape)
    slices = value_and_gradients(lambda x: by_slices(form, x, window, fill=-np.inf), x)
    np.testing.assert_array_equal(direct[0], held.max(3))
    for a, b in zip(direct, slices, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (5, 2), (4, 7)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (3, 2)])
def test_max_pool_with_edges_equals_that_with_infinity(
    shape: tuple[int, int], strides: tuple[int, int]
) -> None:
    window = Window(shape, strides, (1, 1), "FIXED")
    for sizes in ((7, 6), (1, 2), (4, 8)):
        x = tf.constant(np.random.default_rng(0).normal(size=(2, *sizes, 3)))
        found = windows.max_pool(x, window, by_edges=True)
        np.testing.assert_array_equal(found, windows.max_pool(x, window))


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("name", [*WINDOWS, *DILATED])
def test_depthwise_convolution_is_a_sum_over_the_window(name: str, multiplier: int) -> None:
    window = (WINDOWS | DILATED)[name]
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 7, 6, 3)), rng.normal(size=(*window.shape, 3, multiplier))
    held, _ = taken(x, window)
    expected = np.einsum("bhwijc,ijcm->bhwcm", held, w)
    expected = expected.reshape(*expected.shape[:3], -1)
    direct = value_and_gradients(
        lambda x, w: windows.depthwise_convolution(x, w, window=window), x, w
    )

    def sliced(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        form = functools.partial(
            window_slices.depthwise_convolution, w=w, dilations=window.dilations
        )
        return by_slices(form, x, window)

    slices = value_and_gradients(sliced, x, w)
    np.testing.assert_allclose(direct[0], expected, rtol=1e-11, atol=1e-12)
    for a, b in zip(direct, slices, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("name", [*WINDOWS, *DILATED, *COLUMNS])
def test_convolution_is_a_sum_over_window_and_channels(name: str, num_groups: int) -> None:
    window = (WINDOWS | DILATED | COLUMNS)[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 1 if name in COLUMNS else 6, 4))
    w = rng.normal(size=(*window.shape, 4 // num_groups, 6))
    b = rng.normal(size=[6])
    held, _ = taken(x, window)
    held = held.reshape(*held.shape[:-1], num_groups, -1)
    kernels = w.reshape(*w.shape[:3], num_groups, -1)
    expected = np.einsum("bhwijgc,ijcgo->bhwgo", held, kernels)
    expected = expected.reshape(*expected.shape[:3], 6) + b

    def sliced(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        if num_groups == 1:
            form = functools.partial(window_slices.convolution, w=w, dilations=window.dilations)
            return by_slices(form, x, window) + b
        w = tf.reshape(w, [*w.shape[:3], num_groups, -1])
        kernels = tf.transpose(w, [3, 0, 1, 2, 4])

        def blocks(x: tf.Tensor, **rest: Any) -> tf.Tensor:
            x = tf.transpose(tf.reshape(x, [*x.shape[:3], num_groups, -1]), [3, 0, 1, 2, 4])
            y = window_slices.convolution(x, kernels, dilations=window.dilations, **rest)
            return tf.transpose(y, [1, 2, 3, 0, 4])

        return tf.reshape(by_slices(blocks, x, window), expected.shape) + b

    direct = value_and_gradients(
        lambda x, w, b: windows.convolution(x, w, b, window=window), x, w, b
    )
    np.testing.assert_allclose(direct[0], expected, rtol=1e-11, atol=1e-12)
    for found, wanted in zip(value_and_gradients(sliced, x, w, b), direct, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)  # sums of up to 700 terms


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("name", COLUMNS)
def test_sequences_are_convolved_along_rows(name: str, num_groups: int) -> None:
    window = COLUMNS[name]
    rng = np.random.default_rng(0)
    x, b = rng.normal(size=(2, 9, 1, 4)).astype(np.float32), rng.normal(size=[6])
    w = rng.normal(size=(*window.shape, 4 // num_groups, 6)).astype(np.float32)
    form = functools.partial(windows.convolution, window=window)
    args = [x, w, b.astype(np.float32)]
    direct = value_and_gradients(form, *args)
    double = value_and_gradients(form, *(a.astype(np.float64) for a in args))
    for found, wanted in zip(direct, double, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    graph = tf.function(form, autograph=False).get_concrete_function(*map(tf.constant, args)).graph
    inputs = [op.inputs[0].shape for op in graph.get_operations() if op.type == "Conv2D"]
    assert [shape[1] for shape in inputs] == [1] and inputs[0][2] == 9


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["1x1 stride 2", "3x3 stride 2 dilated 2"])
def test_convolution_takes_batches_of_any_size(name: str, groups: int) -> None:
    kernel, dilation = {"1x1 stride 2": (1, 1), "3x3 stride 2 dilated 2": (3, 2)}[name]
    window = Window((kernel, kernel), (2, 2), (dilation, dilation), "SAME")
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 7, 6, 4)), rng.normal(size=(kernel, kernel, 4 // groups, 6))
    b = rng.normal(size=[6])
    form = functools.partial(windows.convolution, window=window)
    spec = [tf.TensorSpec([None, *x.shape[1:]], tf.float64)]
    spec += [tf.TensorSpec(a.shape, tf.float64) for a in (w, b)]
    traced = tf.function(form, input_signature=spec, autograph=False)
    expected = value_and_gradients(form, x, w, b)
    for found, wanted in zip(value_and_gradients(traced, x, w, b), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_a_convolution_are_those_of_slices() -> None:
    window = Window((3, 3), (2, 1), (1, 1), "VALID")
    rng = np.random.default_rng(0)
    x, w = tf.constant(rng.normal(size=(2, 7, 6, 4))), tf.constant(rng.normal(size=(3, 3, 2, 6)))

    def second(form: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.sin(form(x, w)))
            loss = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(loss, [x, w])

    def split(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        parts = zip(tf.split(x, 2, axis=3), tf.split(w, 2, axis=3), strict=True)
        form = functools.partial(window_slices.convolution, dilations=(1, 1))
        return tf.concat([by_slices(functools.partial(form, w=w), x, window) for x, w in parts], 3)

    found = second(lambda x, w: windows.convolution(x, w, window=window))
    for a, b in zip(found, second(split), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_output_size_is_that_of_tensorflow(padding: Padding) -> None:
    for size in (5, 6, 7):
        for k in (1, 2, 3):
            for stride, dilation in ((1, 1), (2, 1), (3, 1), (1, 2)):
                window = Window((k, k), (stride, stride), (dilation, dilation), padding)
                y = tf.nn.conv2d(
                    tf.ones([1, size, size + 1, 1]),
                    tf.ones([k, k, 1, 1]),
                    stride,
                    padding,
                    dilations=dilation,
                )
                assert window.output_size(size, 0) == y.shape[1]
                assert window.output_size(size + 1, 1) == y.shape[2]


def test_a_window_that_does_not_fit_is_refused() -> None:
    window = Window((2, 3), (1, 1), (1, 4), "VALID")
    with pytest.raises(ValueError, match=r"window of 9 \(3, dilated by 4\).*width 6.*SAME"):
        windows.average_pool(tf.ones([1, 5, 6, 1]), window)
    with pytest.raises(ValueError, match="width 6"):
        windows.depthwise_convolution(tf.ones([1, 5, 6, 1]), tf.ones([2, 3, 1, 1]), window=window)
    with pytest.raises(ValueError, match="width 6"):
        windows.convolution(tf.ones([1, 5, 6, 1]), tf.ones([2, 3, 1, 1]), window=window)
    with pytest.raises(ValueError, match="width 6"):
        windows.max_pool(tf.ones([1, 5, 6, 1]), window)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_sums_of_16_bit_images_are_computed_in_float32(dtype: tf.DType) -> None:
    """4096 positions of 1: in bfloat16, 256 + 1 is 256; in float16, 2048 + 1 is 2048."""
    x, window = tf.ones([1, 64, 64, 1], dtype), Window((1, 1), (1, 1), (1, 1), "VALID")
    weights = [tf.ones([1, 1, 1, 1], dtype), tf.zeros([1], dtype)]
    for form in (windows.convolution, windows.depthwise_convolution):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y = form(x, *weights, window=window)
        assert y.dtype == dtype
        for gradient in tape.gradient(y, weights):
            assert (gradient.dtype, float(tf.squeeze(gradient))) == (dtype, 4096)
    whole = windows.average_pool(x, Window((64, 64), (64, 64), (1, 1), "SAME"))
    assert (whole.dtype, float(tf.squeeze(whole))) == (dtype, 1)
