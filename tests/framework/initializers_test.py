"""Initializers: moments, fans, and first values that depend on nothing but seed, path and block."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework import initializers as lib
from tekso.framework.initializers import Fans

N = 200_000
FANS = Fans(30, 50)


def draw(params: lib.Initializer.Params, shape: tuple[int, ...] = (N,), **kwargs: object):
    given = {"seed": 3, "path": "a/w", "fans": FANS} | kwargs
    return lib.draw(params.instantiate(), shape, **given)


# name: Params, expected standard deviation, bound of the absolute value.
GLOROT = math.sqrt(6 / 80)
CASES = {
    "Normal": (lib.Normal.Params(stddev=0.3), 0.3, None),
    # The variance of a normal cut at 2 is 1 - 4 phi(2) / (Phi(2) - Phi(-2)) = 0.7741.
    "TruncatedNormal": (lib.TruncatedNormal.Params(stddev=0.3), 0.3 * math.sqrt(0.77413), 0.6),
    "Uniform": (lib.Uniform.Params(limit=0.3), 0.3 / math.sqrt(3), 0.3),
    "GlorotUniform": (lib.GlorotUniform.Params(), GLOROT / math.sqrt(3), GLOROT),
    "GlorotUniform x2": (lib.GlorotUniform.Params(scale=2), 2 * GLOROT / 3**0.5, 2 * GLOROT),
    "GlorotNormal": (lib.GlorotNormal.Params(scale=0.5), 0.5 * math.sqrt(2 / 80), None),
    "HeNormal": (lib.HeNormal.Params(scale=0.5), 0.5 * math.sqrt(2 / 30), None),
    "LecunNormal": (lib.LecunNormal.Params(scale=0.5), 0.5 / math.sqrt(30), None),
}


@pytest.mark.parametrize("name", CASES)
def test_moments(name: str) -> None:
    params, stddev, bound = CASES[name]
    x = draw(params).astype(np.float64)
    scaled = x / stddev
    assert abs(scaled.mean()) < 5 / math.sqrt(N)  # 5 standard errors
    kurtosis = (scaled**4).mean()
    assert abs((scaled**2).mean() - 1) < 5 * math.sqrt((kurtosis - 1) / N)
    assert abs((scaled**3).mean()) < 5 * math.sqrt(15 / N)
    if bound is None:
        assert abs(kurtosis - 3) < 5 * math.sqrt(96 / N)  # normal
        assert np.abs(scaled).max() > 4
    else:
        assert np.abs(x).max() <= bound * (1 + 1e-6)
        assert np.abs(x).max() > 0.99 * bound


@pytest.mark.parametrize("name", CASES)
def test_draws_are_float32_and_distinct(name: str) -> None:
    x = draw(CASES[name][0], (3, 5, 2))
    assert x.dtype == np.float32
    assert x.shape == (3, 5, 2)
    assert len(np.unique(x)) == 30


def test_constants() -> None:
    assert (draw(lib.Zeros.Params(), (2, 3)) == np.zeros((2, 3))).all()
    assert (draw(lib.Ones.Params(), (2, 3)) == np.ones((2, 3))).all()
    part = draw(lib.Constant.Params(value=0.25), (4, 5), slices=(slice(1, 3), slice(0, 5, 2)))
    np.testing.assert_array_equal(part, np.full((2, 3), 0.25, np.float32), strict=True)


def test_blocks_come_from_philox_seeded_by_a_hash_of_seed_path_and_block() -> None:
    """The rule itself, so that another implementation (or version) could draw the same."""
    size = lib.BLOCK_SIZE + 10
    x = draw(lib.Normal.Params(), (size,), seed=9, path="ffn/w")
    for block, count in ((0, lib.BLOCK_SIZE), (1, 10)):
        digest = hashlib.sha256(f"9\0ffn/w\0{block}".encode()).digest()
        key = np.frombuffer(digest[:16], np.uint64)
        expected = np.random.Generator(np.random.Philox(key=key)).standard_normal(count, np.float32)
        start = block * lib.BLOCK_SIZE
        np.testing.assert_array_equal(x[start : start + count], expected)


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"path": "a/v"}, {"seed": 2**63 + 3}, {"path": "", "seed": 0}]
)
def test_another_seed_or_path_gives_independent_numbers(other: dict[str, object]) -> None:
    first, second = draw(lib.Normal.Params()), draw(lib.Normal.Params(), **other)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(N)


@given(data=st.data())
@settings(max_examples=60)
def test_any_part_is_drawn_as_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), label="shape"))
    slices = []
    for size in shape:
        start = data.draw(st.integers(0, size), label="start")
        slices.append(slice(start, data.draw(st.integers(start, size), label="stop")))
    name = data.draw(st.sampled_from(["Normal", "TruncatedNormal", "Uniform"]), label="name")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, "BLOCK_SIZE", 7)
        whole = draw(CASES[name][0], shape)
        part = draw(CASES[name][0], shape, slices=tuple(slices))
    np.testing.assert_array_equal(part, whole[tuple(slices)], strict=True)


def test_a_part_across_real_blocks_is_drawn_as_the_whole() -> None:
    shape = (5, 3, 10_007)
    whole = draw(lib.TruncatedNormal.Params(), shape)
    slices = (slice(2, 5), slice(1, 2), slice(9_000, 10_007))
    part = draw(lib.TruncatedNormal.Params(), shape, slices=slices)
    np.testing.assert_array_equal(part, whole[slices], strict=True)


def test_negative_and_open_slices_select_as_numpy_does() -> None:
    whole = draw(lib.Normal.Params(), (5, 4))
    for slices in [
        (slice(None), slice(-2, None)),
        (slice(-3, -1), slice(None)),
        (slice(4, 2),) * 2,
    ]:
        part = draw(lib.Normal.Params(), (5, 4), slices=slices)
        np.testing.assert_array_equal(part, whole[slices], strict=True)


def test_a_step_over_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="step 1, but dim 0"):
        draw(lib.Normal.Params(), (5, 4), slices=(slice(0, 5, 2), slice(None)))


def test_given_values_are_those_of_the_weight_and_of_its_slices() -> None:
    values = lib.Values.Params(values=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    np.testing.assert_array_equal(draw(values, (2, 3)), [[1, 2, 3], [4, 5, 6]])
    part = draw(values, (2, 3), slices=(slice(1, 2), slice(0, 2)))
    np.testing.assert_array_equal(part, [[4, 5]])
    with pytest.raises(ValueError, match="has 6 values for a weight of 5 elements"):
        draw(values, (5,))
