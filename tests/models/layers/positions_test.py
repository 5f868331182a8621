"""Added positions against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.positions import LearnedPositions, PositionsBase, SinusoidalPositions

B, T, D = 2, 5, 6


def sinusoid(positions: np.ndarray, dim: int, longest: float) -> np.ndarray:
    """Element by element: sines in the first half, cosines in the second."""
    out = np.zeros([*positions.shape, dim])
    half = dim // 2
    for index in np.ndindex(*positions.shape):
        for i in range(half):
            angle = positions[index] * longest ** (-i / (half - 1))
            out[*index, i], out[*index, half + i] = math.sin(angle), math.cos(angle)
    return out


def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal([B, T, D]).astype(np.float32)


def test_sinusoids_are_those_of_the_formula() -> None:
    layer = SinusoidalPositions.Params(dim=D, max_timescale=500.0).instantiate()

    got = layer.fprop(layer.init(), tf.constant(x()), StepContext()) - x()

    np.testing.assert_allclose(got, [sinusoid(np.arange(T), D, 500.0)] * B, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_sinusoids_of_explicit_positions(as_tensor: bool) -> None:
    positions = np.array([[0, 1, 0, 1, 2], [7, 8, 9, 0, 100]])
    layer = SinusoidalPositions.Params(dim=D).instantiate()
    given = tf.constant(positions) if as_tensor else positions

    got = layer.fprop(layer.init(), tf.constant(x()), StepContext(), positions=given) - x()

    np.testing.assert_allclose(got, sinusoid(positions, D, 1e4), atol=1e-5)


def test_learned_positions_are_rows_of_the_table() -> None:
    layer = LearnedPositions.Params(dim=D, max_length=7).instantiate()
    theta = layer.init(seed=1)
    positions = np.array([[0, 1, 0, 1, 2], [6, 5, 4, 0, 1]], np.int32)

    def added(**kwargs: object) -> np.ndarray:
        return layer.fprop(theta, tf.constant(x()), StepContext(), **kwargs) - x()

    np.testing.assert_allclose(added(), [theta.w[:T]] * B, atol=1e-6)
    for given in (positions, tf.constant(positions)):
        np.testing.assert_allclose(added(positions=given), theta.w.numpy()[positions], atol=1e-6)
    step = np.array([3, 4, 5, 6, 0], np.int32)  # [T], for all rows alike
    np.testing.assert_allclose(added(positions=step), [theta.w.numpy()[step]] * B, atol=1e-6)


def test_weights_are_declared_with_dims() -> None:
    specs = LearnedPositions.Params(dim=D, max_length=7).instantiate().specs()

    assert [(s.shape, s.dims) for s in specs.values()] == [((7, D), ("positions", "embed"))]
    assert not SinusoidalPositions.Params(dim=D).instantiate().specs()


def test_learned_positions_refuse_longer_inputs() -> None:
    layer = LearnedPositions.Params(dim=D, max_length=4).instantiate()

    with pytest.raises(ValueError, match="position 4 is needed, but only 4 are learned"):
        layer.fprop(layer.init(), tf.constant(x()), StepContext())


def test_odd_dim_has_no_halves() -> None:
    with pytest.raises(ValueError, match="dim 5 is odd"):
        SinusoidalPositions.Params(dim=5).instantiate()


def test_base_says_that_it_adds_nothing() -> None:
    layer = PositionsBase.Params(dim=D).instantiate()
    with pytest.raises(NotImplementedError, match="PositionsBase has no fprop"):
        layer.fprop(layer.init(), tf.constant(x()), StepContext())
