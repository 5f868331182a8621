"""Rotary and relative positions against NumPy formulas, one pair of positions at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.attention_positions import (
    RelativeBias,
    RelativeKeys,
    RotaryPositions,
    distance_buckets,
)

B, T, N, H = 2, 5, 3, 6
PACKED = np.array([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]], np.int32)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("positions", [np.arange(T, dtype=np.int32), PACKED])
def test_rotary_turns_pair_i_by_position_times_rate_i(
    positions: np.ndarray, as_tensor: bool
) -> None:
    layer = RotaryPositions.Params(num_heads=N, head_dim=H, base=300.0).instantiate()
    x = random(B, T, N, H)
    given = tf.constant(positions) if as_tensor else positions

    got = layer.rotate(layer.init(), tf.constant(x), given, StepContext())

    want = np.zeros_like(x)
    for b, t in np.ndindex(B, T):
        position = np.broadcast_to(positions, [B, T])[b, t]
        for i in range(H // 2):
            angle = position * 300.0 ** (-2 * i / H)
            turn = np.array(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            )
            pair = [i, i + H // 2]
            want[b, t][:, pair] = x[b, t][:, pair] @ turn.T
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone() -> None:
    layer = RotaryPositions.Params(num_heads=1, head_dim=H).instantiate()
    q, k = random(1, 1, 1, H), random(1, 1, 1, H, seed=1)

    def score(query_position: int, key_position: int) -> float:
        def turn(x: np.ndarray, position: int) -> np.ndarray:
            return layer.rotate(layer.init(), x, np.array([position]), StepContext()).numpy()

        return float((turn(q, query_position) * turn(k, key_position)).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def t5_bucket(distance: int, num_buckets: int, max_distance: int, causal: bool) -> int:
    """Raffel et al. 2020 in words: single distances, then ranges that grow logarithmically."""
    offset = 0
    if not causal:
        num_buckets //= 2
        offset = num_buckets if distance < 0 else 0
    away = max(distance, 0) if causal else abs(distance)
    single = num_buckets // 2
    if away < single:
        return offset + away
    # The largest range r whose lower end, single * (max / single) ** (r / ranges), is not above.
    ranges = num_buckets - single
    r = 0
    while r + 1 < ranges and single * (max_distance / single) ** ((r + 1) / ranges) <= away + 1e-6:
        r += 1
    return offset + single + r


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(8, 20), (32, 128), (4, 5), (16, 9)])
def test_buckets_are_single_distances_then_growing_ranges(
    sizes: tuple[int, int], causal: bool
) -> None:
    num_buckets, max_distance = sizes
    buckets = distance_buckets(num_buckets, max_distance, causal=causal)
    for distance in range(-200, 201):
        clipped = int(np.clip(distance, -max_distance, max_distance))
        want = t5_bucket(distance, num_buckets, max_distance, causal)
        assert buckets[clipped + max_distance] == want


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", [np.arange(T, dtype=np.int32), PACKED])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_relative_bias_is_the_row_of_the_bucket(
    causal: bool, positions: np.ndarray, as_tensor: bool
) -> None:
    layer = RelativeBias.Params(
        num_heads=N, head_dim=H, num_buckets=6, max_distance=4, causal=causal
    ).instantiate()
    theta = layer.init(seed=1)
    given = tf.constant(positions) if as_tensor else positions

    got = layer.bias(theta, random(B, T, N, H), given, given, StepContext(), scale=0.5)

    rows = np.broadcast_to(positions, [len(got), T])
    want = np.zeros([len(rows), N, T, T])
    for b, t, s in np.ndindex(len(rows), T, T):
        distance = int(rows[b, t] - rows[b, s])
        want[b, :, t, s] = theta.w[t5_bucket(distance, 6, 4, causal)]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("positions", [np.arange(T, dtype=np.int32), PACKED])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_relative_keys_are_a_vector_a_clipped_distance(
    positions: np.ndarray, as_tensor: bool
) -> None:
    limit = 2
    layer = RelativeKeys.Params(num_heads=N, head_dim=H, max_distance=limit).instantiate()
    theta, q = layer.init(seed=1), random(B, T, N, H)
    given = tf.constant(positions) if as_tensor else positions

    got = layer.bias(theta, tf.constant(q), given, given, StepContext(), scale=0.5)

    rows = np.broadcast_to(positions, [B, T])
    want = np.zeros([B, N, T, T])
    for b, n, t, s in np.ndindex(B, N, T, T):
        ahead = int(np.clip(rows[b, s] - rows[b, t], -limit, limit))
        want[b, n, t, s] = 0.5 * q[b, t, n] @ theta.w[limit + ahead].numpy()
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_weights_are_declared_with_dims() -> None:
    bias = RelativeBias.Params(num_heads=N, head_dim=H).instantiate()
    keys = RelativeKeys.Params(num_heads=N, head_dim=H, max_distance=4).instantiate()

    assert [(s.shape, s.dims) for s in bias.specs().values()] == [((32, N), (None, "heads"))]
    assert [(s.shape, s.dims) for s in keys.specs().values()] == [((9, H), (None, "head_dim"))]


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="head_dim 5 is odd"):
        RotaryPositions.Params(num_heads=N, head_dim=5).instantiate()
    with pytest.raises(ValueError, match=r"5 buckets up to distance 9; .* be at least 4 and even"):
        distance_buckets(5, 9, causal=False)
    with pytest.raises(ValueError, match="max_distance above 4"):
        distance_buckets(8, 4, causal=True)


@pytest.mark.parametrize("kind", [RelativeBias, RelativeKeys])
def test_gradients_of_frequent_distances_are_summed_in_float32(kind: type[Any]) -> None:
    """In bfloat16, 256 + 1 is 256."""
    layer = kind.Params(num_heads=2, head_dim=3, max_distance=20).instantiate()
    shape = layer.specs()["w"].shape
    length = 64

    def gradient(dtype: tf.DType) -> np.ndarray:
        w, q = tf.zeros(shape, dtype), tf.ones([1, length, 2, 3], dtype)
        places = np.arange(length)
        with tf.GradientTape() as tape:
            tape.watch(w)
            ctx = StepContext(mode="train")
            bias = layer.bias(Theta(w=w), q, places, places, ctx, scale=1.0)
        return tf.cast(tf.convert_to_tensor(tape.gradient(bias, w)), tf.float64).numpy()

    np.testing.assert_allclose(gradient(tf.bfloat16), gradient(tf.float64), rtol=4e-3)
