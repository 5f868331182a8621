"""Compares two groups of runs: means, spreads, Welch's t test, and how many seeds would decide.

Source:
  Welch 1947, "The generalization of 'Student's' problem when several different population variances
  are involved"; degrees of freedom: Welch 1938, Satterthwaite 1946. The number of seeds uses the
  usual approximation of the test's power: the difference must be t(1 - level / 2) + t(power)
  standard errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tekso.framework.run import quiet_tensorflow

LEVEL = 0.05
POWER = 0.8
_MOST_SEEDS = 10_000


@dataclasses.dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation (None of a single value) and number of values."""

    mean: float
    std: float | None
    count: int


@dataclasses.dataclass(frozen=True)
class WelchTest:
    """The result of a comparison of two groups.

    Attributes:
      difference: mean of the second group minus mean of the first.
      t: Welch's statistic; None: a group has a single value.
      freedom: degrees of freedom; None: as `t`, or no value of a group differs from another.
      p: two-sided p-value; None: as `t`.
      seeds: runs that each group needs, so that a difference of this size is significant at the
        level of 5 % in 80 % of all repetitions; None: unknown, or more than 10,000.
    """

    difference: float
    t: float | None
    freedom: float | None
    p: float | None
    seeds: int | None

    @property
    def is_decided(self) -> bool:
        """Whether the difference is significant at the level of 5 %."""
        return self.p is not None and self.p < LEVEL


def summary(values: Sequence[float]) -> Summary:
    """Returns mean and spread of at least one value."""
    unit, count = _unit(values), len(values)
    first = values[0] / unit
    # From the first value: the mean of equal values is this value, and they have no spread.
    offsets = [value / unit - first for value in values]
    mean = math.fsum(offsets) / count
    if count == 1:
        return Summary(values[0], None, 1)
    variance = math.fsum((offset - mean) ** 2 for offset in offsets) / (count - 1)
    return Summary((first + mean) * unit, math.sqrt(variance) * unit, count)


def welch(first: Sequence[float], second: Sequence[float]) -> WelchTest:
    """Tests whether the means of two groups differ; each group has at least one value."""
    unit = _unit([*first, *second])  # squares of values above 1e154 are infinite
    test = _welch([value / unit for value in first], [value / unit for value in second])
    return dataclasses.replace(test, difference=test.difference * unit)


def _unit(values: Sequence[float]) -> float:
    """Returns a power of 2 by which values are divided exactly, to at most 1; 1 for zeros."""
    return 2.0 ** min(1023, math.frexp(max(map(abs, values)))[1])


def _welch(first: Sequence[float], second: Sequence[float]) -> WelchTest:
    a, b = summary(first), summary(second)
    difference = b.mean - a.mean
    if a.std is None or b.std is None:
        return WelchTest(difference, None, None, None, None)
    errors = [a.std / math.sqrt(a.count), b.std / math.sqrt(b.count)]  # of the means
    error = math.hypot(*errors)
    if error == 0.0:
        is_same = difference == 0.0
        t = 0.0 if is_same else math.copysign(math.inf, difference)
        return WelchTest(difference, t, None, 1.0 if is_same else 0.0, None if is_same else 2)
    shares = [(one / error) ** 2 for one in errors]
    freedom = 1.0 / (shares[0] ** 2 / (a.count - 1) + shares[1] ** 2 / (b.count - 1))
    t = difference / error
    return WelchTest(difference, t, freedom, p_value(t, freedom), seeds(difference, a.std, b.std))


def p_value(t: float, freedom: float) -> float:
    """Returns the probability that |T| is at least |t|, for Student's distribution."""
    quiet_tensorflow.import_tensorflow()
    import tensorflow as tf

    x = freedom / (freedom + t * t)
    args = [tf.constant(value, tf.float64) for value in (freedom / 2, 0.5, x)]
    return float(tf.math.betainc(*args))


def quantile(probability: float, freedom: float) -> float:
    """Returns the t below which a value lies with a probability of at least 0.5."""
    tail, low, high = 2 * (1 - probability), 0.0, 1.0
    while p_value(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def seeds(difference: float, std: float, other: float) -> int | None:
    """Returns how many runs each of two groups needs to decide a difference; see `WelchTest`."""
    if difference == 0.0:
        return None
    spread = math.hypot(std, other)
    shares = [(one / spread) ** 2 for one in (std, other)]

    def suffices(count: int) -> bool:
        freedom = (count - 1) / (shares[0] ** 2 + shares[1] ** 2)
        needed = quantile(1 - LEVEL / 2, freedom) + quantile(POWER, freedom)
        return abs(difference) >= needed * spread / math.sqrt(count)

    few, many = 1, 2
    while not suffices(many):
        few, many = many, 2 * many
        if few > _MOST_SEEDS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if suffices(middle) else (middle, many)
    return many if many <= _MOST_SEEDS else None
