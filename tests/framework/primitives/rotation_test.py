"""Rotation of pairs of dims, as multiplication of complex numbers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tekso.framework.primitives.fusion import XlaFusion
from tekso.framework.primitives.rotation import rotate

B, T, N, H = 2, 3, 5, 6


def test_pairs_turn_like_complex_numbers() -> None:
    r = np.random.default_rng(0)
    x, angles = r.standard_normal([B, T, N, H]), r.standard_normal([T, 1, H // 2])

    got = rotate(tf.constant(x), np.sin(angles), np.cos(angles))

    turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * angles)
    want = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_gradient_is_the_rotation_back() -> None:
    r = np.random.default_rng(0)
    x, dy = r.standard_normal([2, B, T, N, H])
    angles = r.standard_normal([B, T, 1, H // 2])
    sine, cosine = np.sin(angles), np.cos(angles)

    for fuse in [{}, {"fuse": XlaFusion()}]:
        with tf.GradientTape() as tape:
            leaf = tf.constant(x)
            tape.watch(leaf)
            y = rotate(leaf, sine, cosine, **fuse)
        got = tape.gradient(y, leaf, output_gradients=tf.constant(dy))

        back = (dy[..., : H // 2] + 1j * dy[..., H // 2 :]) * np.exp(-1j * angles)
        np.testing.assert_allclose(got, np.concatenate([back.real, back.imag], -1), rtol=1e-12)
