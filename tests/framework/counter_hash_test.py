"""The counter hash: its rule in NumPy, its statistics, and independence of position and layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tekso.framework import counter_hash

SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1]
STEPS = [0, 1, 2**31 - 1, 2**31, 2**31 + 7, 2**32, 2**40 + 3]
GOLDEN = 0x9E3779B1
MASK = 0xFFFFFFFF


# The same rule in Python integers and NumPy.


def finalise(x: np.ndarray | int) -> np.ndarray:
    x = np.asarray(x, np.uint64)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & np.uint64(MASK)
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & np.uint64(MASK)
    return x ^ (x >> np.uint64(16))


def fold(key: int, value: int) -> int:
    for word in (value & MASK, value >> 32 & MASK):
        key = int(finalise((key * GOLDEN & MASK) ^ word))
    return key


def bits(key: int, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    out = np.zeros((shape[0], math.prod(shape[1:])), np.uint32)
    for i in range(shape[0]):
        row = int(finalise((key + (i + offset) * GOLDEN) & MASK))
        positions = np.arange(out.shape[1], dtype=np.uint64)
        out[i] = finalise(((positions * np.uint64(GOLDEN)) & np.uint64(MASK)) ^ np.uint64(row))
    return out.reshape(shape)


def key_of(seed: int, step: int = 0, stream: str = "ffn/dropout:") -> tf.Tensor:
    return counter_hash.fold(counter_hash.root_key(seed, step), counter_hash.stream(stream))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step", STEPS)
def test_keys_equal_the_rule_for_python_and_tensor_steps(seed: int, step: int) -> None:
    expected = fold(fold(0x7E450, seed), step)
    graph = tf.function(counter_hash.root_key, autograph=False)
    for given_step in (step, np.int64(step), tf.constant(step, tf.int64)):
        assert int(counter_hash.root_key(seed, given_step)) == expected
    assert int(graph(seed, tf.constant(step, tf.int64))) == expected


def test_keys_of_all_seeds_and_steps_differ() -> None:
    keys = {int(counter_hash.root_key(seed, step)) for seed in SEEDS for step in STEPS}
    assert len(keys) == len(SEEDS) * len(STEPS)


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (2, 3, 5), (3, 1, 2, 4)])
@pytest.mark.parametrize("offset", [0, 3, 2**31, 2**32 - 2])
def test_bits_equal_the_rule_eager_in_a_graph_and_compiled(
    shape: tuple[int, ...], offset: int
) -> None:
    key = tf.constant(0xDEADBEEF, tf.uint32)
    expected = bits(0xDEADBEEF, shape, offset)

    def draw(key: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        return counter_hash.bits(key, shape, offset)

    given_offset = tf.constant(offset, tf.uint32)
    for function in (
        draw,
        tf.function(draw, autograph=False),
        tf.function(draw, autograph=False, jit_compile=True),
    ):
        np.testing.assert_array_equal(function(key, given_offset), expected, strict=True)


def test_bits_of_no_dims_are_one_number() -> None:
    assert int(counter_hash.bits(tf.constant(7, tf.uint32), [])) == int(finalise(7))


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    inner=st.lists(st.integers(1, 3), max_size=2),
    start=st.integers(0, 2**31),
)
@example(parts=[1, 2, 1], inner=[3], start=2**31 - 2)
@settings(max_examples=25)
def test_parts_of_a_batch_draw_what_the_whole_batch_draws(
    parts: list[int], inner: list[int], start: int
) -> None:
    key = key_of(3)
    whole = counter_hash.uniform(key, [sum(parts), *inner], start)
    offset, drawn = start, []
    for size in parts:
        drawn.append(counter_hash.uniform(key, [size, *inner], offset))
        offset += size
    np.testing.assert_array_equal(tf.concat(drawn, 0), whole)


def test_uniform_is_the_top_24_bits() -> None:
    u = counter_hash.uniform(tf.constant(5, tf.uint32), [3, 7], 2)
    expected = (bits(5, (3, 7), 2) >> 8) / 2.0**24
    np.testing.assert_array_equal(u, expected.astype(np.float32), strict=True)


def chi_square(counts: np.ndarray) -> float:
    """Returns the chi-square statistic against equal counts, in standard deviations."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


ROWS, COLUMNS = 500, 1000
N = ROWS * COLUMNS


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1, 2**31 + 7), (2**63, 12)])
def test_uniform_in_distribution(seed: int, step: int) -> None:
    u = counter_hash.uniform(key_of(seed, step), [ROWS, COLUMNS]).numpy().astype(np.float64)
    assert 0 <= u.min() < 5 / N
    assert 1 - 20 / N < u.max() < 1
    z = (u - 0.5) * math.sqrt(12)
    assert abs(z.mean()) < 5 / math.sqrt(N)
    assert abs((z**2).mean() - 1) < 5 * math.sqrt(0.8 / N)  # kurtosis 1.8
    assert abs((z**3).mean()) < 5 * math.sqrt(27 / 7 / N)
    assert abs(chi_square(np.bincount((u * 1000).astype(int).ravel(), minlength=1000))) < 5
    # Neighbours in a row, and the same column of neighbouring rows, in a grid of 30 x 30 cells.
    cell = (u * 30).astype(int)
    for a, b in ((cell[:, :-1], cell[:, 1:]), (cell[:-1], cell[1:])):
        assert abs(chi_square(np.bincount((30 * a + b).ravel(), minlength=900))) < 5


@pytest.mark.parametrize("seed", [0, 2**63])
def test_normal_in_distribution(seed: int) -> None:
    drawn = counter_hash.normal(key_of(seed), [ROWS, COLUMNS]).numpy()
    assert drawn.dtype == np.float32
    z = drawn.astype(np.float64)
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - mean) < 5 * math.sqrt(variance / N), power
    shares = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in np.linspace(-3, 3, 13)])
    counts = np.diff(
        np.concatenate([[0], np.searchsorted(np.sort(z.ravel()), np.linspace(-3, 3, 13)), [N]])
    )
    expected = N * np.diff(np.concatenate([[0], shares, [1]]))
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 13) < 5 * math.sqrt(2 * 13)


def test_normal_is_finite_and_symmetric_for_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest, middle, largest = [0, 0xFF, 0x100], [0x7FFFFFFF, 0x80000000], [0xFFFFFE00, 0xFFFFFF00]
    extremes = tf.constant([*smallest, *middle, *largest, 0xFFFFFFFF], tf.uint32)
    monkeypatch.setattr(counter_hash, "bits", lambda *_: extremes)
    u = counter_hash.uniform(key_of(0), [8]).numpy()
    assert u[0] == 0 and u[-1] == 1 - 2.0**-24
    z = counter_hash.normal(key_of(0), [8]).numpy()
    np.testing.assert_array_equal(z, -z[::-1])
    assert z[0] == z[1] == z[2] and 5.2 < z[-1] < 5.3 and 0 < z[4] < 1e-6


def test_every_bit_is_set_half_of_the_time() -> None:
    drawn = counter_hash.bits(key_of(2), [ROWS, COLUMNS]).numpy()
    for bit in range(32):
        share = ((drawn >> np.uint32(bit)) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(N), bit


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the correlation, in standard errors."""
    return float(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * math.sqrt(a.size))


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 128, 256, 512])
def test_no_serial_correlation_along_rows_and_columns(lag: int) -> None:
    u = counter_hash.uniform(key_of(1), [ROWS + lag, COLUMNS]).numpy()
    assert correlation(u[:, :-lag], u[:, lag:]) < 5
    assert correlation(u[:-lag], u[lag:]) < 5


def test_streams_steps_seeds_and_turns_are_independent() -> None:
    shape = [ROWS, COLUMNS]
    root = key_of(1, 5)
    keys = {
        "first": root,
        "next step": key_of(1, 6),
        "step + 2**32": key_of(1, 5 + 2**32),
        "next seed": key_of(2, 5),
        "next stream": key_of(1, 5, "ffn/dropout:2"),
        "other layer": key_of(1, 5, "attention/dropout:"),
        "turn 0": counter_hash.fold(root, 0),
        "turn 1": counter_hash.fold(root, 1),
        "turn 1 of 1": counter_hash.fold(counter_hash.fold(root, 1), 1),
    }
    drawn = {name: counter_hash.uniform(key, shape).numpy() for name, key in keys.items()}
    names = list(drawn)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert correlation(drawn[a], drawn[b]) < 5, (a, b)


def test_rows_of_a_batch_share_no_runs() -> None:
    """Rows are not one sequence from different starts: windows of three are all distinct."""
    drawn = counter_hash.bits(key_of(0), [300, 200]).numpy().astype(object)
    windows = {tuple(row[i : i + 3]) for row in drawn for i in range(198)}
    assert len(windows) == 300 * 198


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_keep_mask_drops_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    mask = counter_hash.keep_mask(key_of(4), rate, [ROWS, COLUMNS]).numpy()
    assert set(np.unique(mask)) <= {np.float32(0), np.float32(1 / (1 - rate))}
    dropped = (mask == 0).mean()
    assert abs(dropped - rate) <= 5 * math.sqrt(rate * (1 - rate) / N)


def test_keep_mask_is_the_comparison_of_uniform() -> None:
    key = key_of(4)
    mask = counter_hash.keep_mask(key, 0.25, [3, 50], 7)
    u = counter_hash.uniform(key, [3, 50], 7)
    np.testing.assert_array_equal(mask, np.where(u >= 0.25, np.float32(1 / 0.75), np.float32(0)))


def test_stream_is_crc32_of_the_name() -> None:
    assert counter_hash.stream("123456789") == 0xCBF43926  # the check value of CRC-32


@pytest.mark.parametrize("draws", [counter_hash.uniform, counter_hash.normal])
def test_a_shape_that_is_a_tensor_is_answered_with_the_shape_of_the_array(draws: Any) -> None:
    def draw(y: tf.Tensor) -> tf.Tensor:
        return draws(key_of(1), tf.shape(y))

    message = r"is a tensor, but must be numbers: write y\.shape instead of tf\.shape\(y\)$"
    for run in (draw, tf.function(draw)):
        with pytest.raises(counter_hash.RandomShapeError, match=message):
            run(tf.ones([2, 3]))
