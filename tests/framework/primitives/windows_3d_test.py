"""Convolution and pooling of volumes against loops in NumPy, with gradients."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.primitives import windows
from tekso.framework.primitives.windows import Window

SIZES = (5, 6, 4)
WINDOWS = {
    "2x2x2 stride 2": Window((2, 2, 2), (2, 2, 2), (1, 1, 1), "SAME"),
    "3x3x3": Window((3, 3, 3), (1, 1, 1), (1, 1, 1), "SAME"),
    "1x1x1 strides 1, 2, 2": Window((1, 1, 1), (1, 2, 2), (1, 1, 1), "SAME"),
    "3x1x2 strides 2, 1, 3 fixed": Window((3, 1, 2), (2, 1, 3), (1, 1, 1), "FIXED"),
    "2x3x2 valid": Window((2, 3, 2), (1, 2, 1), (1, 1, 1), "VALID"),
}
DILATED = {"dilated": Window((2, 3, 2), (1, 1, 2), (2, 1, 2), "SAME")}


def taken(x: np.ndarray, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Returns what every window holds, [B, *new, *window, C], and whether it is of the volume."""
    sizes = [window.output_size(size, d) for d, size in enumerate(SIZES)]
    out = np.zeros((len(x), *sizes, *window.shape, x.shape[-1]))
    real = np.zeros((*sizes, *window.shape), bool)
    for place in np.ndindex(*real.shape):
        at = [
            place[d] * window.strides[d]
            - window.pads(SIZES[d], d)[0]
            + place[3 + d] * window.dilations[d]
            for d in range(3)
        ]
        if all(0 <= a < size for a, size in zip(at, SIZES, strict=True)):
            out[(slice(None), *place)] = x[(slice(None), *at)]
            real[place] = True
    return out, real


def gradients_by_differences(function: Any, args: list[np.ndarray]) -> None:
    """Checks the gradients in a random direction: by differences, in float64."""
    tensors = [tf.constant(a) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss = tf.reduce_sum(tf.sin(function(*tensors)))
    found = tape.gradient(loss, tensors)
    rng = np.random.default_rng(3)
    moves = [rng.normal(size=a.shape) for a in args]
    ends = []
    for step in (1e-6, -1e-6):
        moved = [x + step * m for x, m in zip(tensors, moves, strict=True)]
        ends.append(float(tf.reduce_sum(tf.sin(function(*moved)))))
    slope = sum(float(tf.reduce_sum(g * m)) for g, m in zip(found, moves, strict=True))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("name", [*WINDOWS, *DILATED])
def test_convolution_is_a_sum_over_window_and_channels(name: str, num_groups: int) -> None:
    window = (WINDOWS | DILATED)[name]
    rng = np.random.default_rng(0)
    x, b = rng.normal(size=(2, *SIZES, 4)), rng.normal(size=[6])
    w = rng.normal(size=(*window.shape, 4 // num_groups, 6))
    held, _ = taken(x, window)
    held = held.reshape(*held.shape[:-1], num_groups, -1)
    kernels = w.reshape(*w.shape[:-1], num_groups, -1)
    wanted = np.einsum("bxyzijkgc,ijkcgo->bxyzgo", held, kernels)
    form = functools.partial(windows.convolution, window=window)
    found = form(*map(tf.constant, (x, w, b)))
    np.testing.assert_allclose(found, wanted.reshape(found.shape) + b, rtol=1e-11, atol=1e-12)
    gradients_by_differences(form, [x, w, b])


def test_depthwise_convolution_has_a_kernel_for_every_channel() -> None:
    rng, window = np.random.default_rng(0), DILATED["dilated"]
    x, w = rng.normal(size=(2, *SIZES, 3)), rng.normal(size=(*window.shape, 3, 2))
    wanted = np.einsum("bxyzijkc,ijkcm->bxyzcm", taken(x, window)[0], w)
    form = functools.partial(windows.depthwise_convolution, window=window)
    found = form(tf.constant(x), tf.constant(w))
    np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=1e-11, atol=1e-12)
    gradients_by_differences(form, [x, w])


@pytest.mark.parametrize("name", WINDOWS)
def test_pools_are_the_mean_and_the_largest_of_what_lies_inside(name: str) -> None:
    window = WINDOWS[name]
    x = np.random.default_rng(0).normal(size=(2, *SIZES, 3))
    held, real = taken(x, window)
    mean = held.sum((4, 5, 6)) / real.sum((3, 4, 5))[None, ..., None]
    found = windows.average_pool(tf.constant(x), window)
    np.testing.assert_allclose(found, mean, rtol=1e-12, atol=1e-14)
    largest = np.where(real[None, ..., None], held, -np.inf).max((4, 5, 6))
    np.testing.assert_array_equal(windows.max_pool(tf.constant(x), window), largest)
    for pool in (windows.average_pool, windows.max_pool):
        gradients_by_differences(functools.partial(pool, window=window), [x])


def test_the_first_of_equal_elements_gets_the_gradient() -> None:
    x = tf.zeros([1, 2, 2, 2, 1])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = windows.max_pool(x, WINDOWS["2x2x2 stride 2"])
    assert tape.gradient(y, x).numpy().ravel().tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_a_window_that_does_not_fit_names_the_dim() -> None:
    window = Window((6, 1, 1), (1, 1, 1), (1, 1, 1), "VALID")
    with pytest.raises(ValueError, match="does not fit in depth 5 with padding VALID"):
        windows.max_pool(tf.ones([1, *SIZES, 1]), window)
