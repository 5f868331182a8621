"""Fusion: the same numbers, one compiled function a stretch, and nothing shared by two towers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tekso.framework.primitives.fusion import XlaFusion, no_fusion

TRACES: list[float] = []


def scaled(x: tf.Tensor, y: tf.Tensor, *, factor: float) -> tf.Tensor:
    TRACES.append(factor)
    return tf.sin(x) * factor + y


def test_gives_the_function_with_its_static_arguments_bound() -> None:
    x, y = tf.constant([0.5, 2.0]), tf.constant([1.0, -1.0])
    for fuse in (no_fusion, XlaFusion()):
        np.testing.assert_allclose(
            fuse(scaled, factor=3.0)(x, y), 3 * np.sin([0.5, 2]) + [1, -1], rtol=1e-6
        )


def test_compiles_a_stretch_once_for_every_choice_of_its_static_arguments() -> None:
    fuse = XlaFusion()
    assert fuse(scaled, factor=2.0) is fuse(scaled, factor=2.0)
    assert fuse(scaled, factor=2.0) is not fuse(scaled, factor=3.0)
    TRACES.clear()
    for _ in range(3):
        fuse(scaled, factor=2.0)(tf.ones([2]), tf.ones([2]))
    assert TRACES == [2.0]


def test_two_instances_share_no_compiled_function() -> None:
    first, second = XlaFusion(), XlaFusion()
    assert first(scaled, factor=2.0) is not second(scaled, factor=2.0)
