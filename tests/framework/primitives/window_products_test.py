"""Convolution of small images by matrix products, against the convolution by slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import onednn
from tekso.framework.primitives import windows
from tekso.framework.primitives.windows import Padding, Window

CASES: dict[str, tuple[tuple[int, ...], Window]] = {
    "3x3": ((2, 3), Window((3, 3), (1, 1), (1, 1), "SAME")),
    "3x2 strides 2, 1": ((4, 3), Window((3, 2), (2, 1), (1, 1), "SAME")),
    "fixed padding, stride 2": ((4, 4), Window((3, 3), (2, 2), (1, 1), "FIXED")),
    "valid, dilated": ((5, 4), Window((2, 3), (1, 1), (2, 1), "VALID")),
    "elements that are always in the padding": ((2, 1), Window((5, 3), (1, 1), (1, 1), "SAME")),
    "only padding": ((1, 1), Window((2, 2), (1, 1), (2, 2), "SAME")),
    "volumes": ((2, 3, 2), Window((2, 3, 3), (1, 2, 1), (1, 1, 1), "SAME")),
}


def value_and_gradients(form: Any, x: tf.Tensor, w: tf.Tensor) -> list[np.ndarray]:
    """Returns the value, its gradients, and gradients of a function of these."""
    with tf.GradientTape() as outer:
        outer.watch([x, w])
        with tf.GradientTape() as inner:
            inner.watch([x, w])
            y = form(x, w)
            loss = tf.reduce_sum(tf.sin(y))
        first = inner.gradient(loss, [x, w])
        loss = tf.add_n([tf.reduce_sum(tf.sin(2 * g)) for g in first])
    return [np.asarray(value) for value in (y, *first, *outer.gradient(loss, [x, w]))]


@pytest.mark.parametrize("name", CASES)
def test_products_are_a_convolution_with_all_its_derivatives(name: str) -> None:
    spatial, window = CASES[name]
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(3, *spatial, 4)))
    w = tf.constant(rng.normal(size=(*window.shape, 4, 5)))
    found = value_and_gradients(lambda x, w: windows._by_products(x, w, window), x, w)
    wanted = value_and_gradients(lambda x, w: windows._convolved_by_slices(x, w, window), x, w)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)  # sums of up to 144 terms


def _graph(x: Any, w: tuple[int, ...], **options: Any) -> Any:
    """Returns a convolution traced for a batch of any size."""
    padding: Padding = options.pop("padding", "SAME")
    strides = options.pop("strides", (1, 1))
    options.setdefault("may_multiply", True)
    window = Window(w[:-2], strides, (1, 1), padding)
    spec = [tf.TensorSpec([None, *x]), tf.TensorSpec(w)]
    traced = tf.function(
        lambda x, w: windows.convolution(x, w, window=window, **options), autograph=False
    )
    return traced.get_concrete_function(*spec)


def _counts(graph: Any) -> dict[str, int]:
    types = [op.type for op in graph.graph.get_operations()]
    return {name: types.count(name) for name in ("Conv2D", "MatMul")}


@pytest.mark.skipif(not onednn.is_enabled(), reason="the products are for CPUs with oneDNN")
def test_small_images_with_large_weights_are_convolved_by_products() -> None:
    large = (3, 3, 512, 128)
    assert _counts(_graph((2, 2, 512), large)) == {"Conv2D": 0, "MatMul": 9}
    # Four elements of a 3x3 kernel with stride 2 have a window inside of a 2x2 image.
    strided = _graph((2, 2, 512), large, strides=(2, 2), padding="FIXED")
    assert _counts(strided) == {"Conv2D": 0, "MatMul": 4}
    kernel = {"Conv2D": 1, "MatMul": 0}
    assert _counts(_graph((5, 4, 512), large)) == kernel  # more outputs
    assert _counts(_graph((2, 2, 128), (3, 3, 128, 128))) == kernel  # fewer weights
    assert _counts(_graph((16, 16, 3), (16, 16, 3, 512), padding="VALID")) == kernel  # of patches
    assert _counts(_graph((2, 2, 512), (1, 1, 512, 512))) == kernel
    assert _counts(_graph((2, 2, 512), large, may_multiply=False)) == kernel


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_both_forms_have_the_same_values_in_every_type(dtype: tf.DType) -> None:
    rng = np.random.default_rng(0)
    window = Window((3, 3), (1, 1), (1, 1), "SAME")
    x = tf.constant(rng.normal(size=(3, 2, 2, 512)), dtype)
    w, b = tf.constant(rng.normal(size=(3, 3, 512, 128)), dtype), tf.constant([2.0] * 128, dtype)
    found = [windows.convolution(x, w, b, window=window, may_multiply=c) for c in (True, False)]
    assert found[0].dtype == dtype
    tolerance = 1e-5 if dtype == tf.float32 else 8e-3  # a rounding of the result
    found = [tf.cast(value, tf.float32).numpy() for value in found]
    scale = np.abs(found[1]).max()
    np.testing.assert_allclose(found[0], found[1], rtol=tolerance, atol=tolerance * scale / 8)
