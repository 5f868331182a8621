"""Welch's test, the number of seeds and the summary of values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tekso.tools.comparison import statistics


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1.0, 1.2, 1.1], [2.0, 2.3, 1.6, 2.2]),
        ([1.0, 1.5], [1.1, 1.2, 1.3]),
        ([5.0, 5.0, 5.1], [5.1, 5.3]),
    ],
)
def test_the_test_is_welchs_and_the_number_of_seeds_has_its_power(
    first: list[float], second: list[float]
) -> None:
    found = statistics.welch(first, second)
    wanted = stats.ttest_ind(second, first, equal_var=False)
    assert found.t == pytest.approx(wanted.statistic) and found.p == pytest.approx(wanted.pvalue)
    assert found.freedom == pytest.approx(wanted.df)
    assert found.seeds is not None

    def power(count: int) -> float:  # by the noncentral distribution
        a, b = stats.tvar(first), stats.tvar(second)
        freedom = (a + b) ** 2 * (count - 1) / (a**2 + b**2)
        shift = abs(found.difference) / math.sqrt((a + b) / count)
        return float(stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, shift))

    assert power(found.seeds) > 0.77
    assert found.seeds == 2 or power(found.seeds - 1) < 0.83


# Student 1908, table 1: additional hours of sleep by two drugs.
SLEEP = (
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


@pytest.mark.parametrize(
    ("first", "second", "t", "freedom", "p"),
    [
        (*SLEEP, 1.8608, 17.776, 0.07939),
        ([*range(1, 11)], [*range(7, 21)], 5.4349, 21.982, 1.855e-5),
        ([*range(1, 11)], [*range(7, 21), 200], 1.6329, 14.165, 0.1245),
    ],
)
def test_the_test_gives_the_figures_of_the_examples_of_r(
    first: list[float], second: list[float], t: float, freedom: float, p: float
) -> None:
    """As printed by the examples of R's manual of t.test, to their last digit."""
    found = statistics.welch(first, second)
    assert found.t == pytest.approx(t, abs=5e-5)
    assert found.freedom == pytest.approx(freedom, abs=5e-4)
    assert found.p == pytest.approx(p, rel=5e-4)
    assert found.is_decided == (p < 0.05)
    assert statistics.welch(second, first).t == pytest.approx(-t, abs=5e-5)


@pytest.mark.parametrize(
    ("difference", "count"), [(0.4, 100), (0.5, 64), (0.6, 45), (0.8, 26), (1.0, 17), (1.2, 12)]
)
def test_the_number_of_seeds_is_that_of_cohens_table(difference: float, count: int) -> None:
    """Cohen 1988, table 2.4.1, for a power of 80 % and 5 %, two-sided."""
    assert statistics.seeds(difference, 1.0, 1.0) == count
    assert statistics.seeds(-10 * difference, 10.0, 10.0) == count


@pytest.mark.parametrize(("t", "is_decided"), [(4.302, False), (4.303, True), (-4.303, True)])
def test_a_difference_is_decided_from_the_critical_value_on(t: float, is_decided: bool) -> None:
    """Of Student's table: 4.3027 for two degrees of freedom and 5 %, two-sided."""
    shift = t * math.sqrt(2)  # each variance is 2, and each mean is of two values
    found = statistics.welch([-1.0, 1.0], [shift - 1, shift + 1])
    assert found.freedom == pytest.approx(2) and found.t == pytest.approx(t)
    assert found.is_decided is is_decided


@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e307, 2.0**-1022])
def test_values_whose_squares_are_infinite_or_zero_are_compared(scale: float) -> None:
    first, second = [1.0, 1.2, 1.1], [2.0, 2.3, 1.6, 2.2]
    plain = statistics.welch(first, second)
    found = statistics.welch([scale * v for v in first], [scale * v for v in second])
    assert found.difference == pytest.approx(scale * plain.difference, rel=1e-9, abs=0.0)
    assert (found.t, found.p) == pytest.approx((plain.t, plain.p))
    assert found.freedom == pytest.approx(plain.freedom) and found.seeds == plain.seeds
    summary = statistics.summary([scale * v for v in second])
    assert summary.mean == pytest.approx(scale * np.mean(second), rel=1e-9, abs=0.0)
    assert summary.std == pytest.approx(scale * np.std(second, ddof=1), rel=1e-9, abs=0.0)


def test_single_and_constant_values_are_not_tested() -> None:
    one = statistics.welch([1.0], [2.0, 3.0])
    assert (one.difference, one.t, one.p, one.seeds) == (1.5, None, None, None)
    assert not one.is_decided
    same = statistics.welch([2.0, 2.0], [2.0, 2.0])
    assert (same.p, same.seeds) == (1.0, None)
    other = statistics.welch([2.0, 2.0], [3.0, 3.0])
    assert other.is_decided and (other.p, other.seeds) == (0.0, 2)
    # 2 * (1.96 + 0.84)**2 / difference**2 seeds: 9,810 and 12,262
    assert statistics.seeds(0.04, 1.0, 1.0) == pytest.approx(9_812, abs=5)
    assert statistics.seeds(0.03578, 1.0, 1.0) is None


@pytest.mark.parametrize(("value", "first", "second"), [(0.4936, 9, 4), (0.7, 10, 3), (0.1, 3, 7)])
def test_equal_values_do_not_differ_whatever_their_number(
    value: float, first: int, second: int
) -> None:
    # The sum of nine 0.4936, divided by nine, is not 0.4936.
    assert statistics.summary([value] * first) == statistics.Summary(value, 0.0, first)
    found = statistics.welch([value] * first, [value] * second)
    assert (found.difference, found.p, found.seeds) == (0.0, 1.0, None)


def test_a_spread_that_is_tiny_beside_the_other_values_is_compared() -> None:
    for scale in (1e-82, 1e-160):
        found = statistics.welch([scale, 2 * scale], [1.0, 1.0])
        assert (found.difference, found.freedom, found.seeds) == pytest.approx((1.0, 1.0, 2))
        assert found.is_decided
