"""Standardization: its formula and its inverse; numbers that do not fit are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.standardization import Standardization

MEAN, SCALE = [1.0, -20.0, 3.0], [2.0, 0.5, 7.0]


def test_numbers_are_centred_and_scaled_and_back() -> None:
    layer = Standardization.Params(mean=MEAN, scale=SCALE).instantiate()
    assert {path: (s.shape, s.trainable) for path, s in layer.specs().items()} == {
        "mean": ((3,), False),
        "scale": ((3,), False),
    }
    theta, ctx = layer.init(1), StepContext()
    x = np.arange(12).reshape(2, 2, 3)
    y = layer.fprop(theta, tf.constant(x), ctx)
    np.testing.assert_allclose(y, (x - MEAN) / SCALE, rtol=1e-6)
    np.testing.assert_allclose(layer.inverse(theta, y, ctx), x, atol=1e-5)
    with pytest.raises(ValueError, match=r"x is \[2, 4\], but its last dim must be 3"):
        layer.fprop(theta, tf.zeros([2, 4]), ctx)


@pytest.mark.parametrize(
    ("mean", "scale", "said"),
    [
        ([], [], "equally many, at least 1"),
        (MEAN, [1.0], "equally many, at least 1"),
        (MEAN, [1.0, 0.0, 1.0], r"scale has 0\.0, but scales must be above 0"),
        (MEAN, [1.0, 1e-46, 1.0], "scale has 1e-46, but scales must be above 0"),
        (MEAN, [1.0, math.nan, 1.0], "not finite"),
        ([1.0, math.inf, 3.0], [1.0] * 3, "not finite"),
    ],
)
def test_means_and_scales_that_do_not_fit_are_refused(mean: Any, scale: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Standardization.Params(mean=mean, scale=scale).instantiate()
