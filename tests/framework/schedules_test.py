"""Schedules against their formulas in float64, their shape, and steps beyond 2**31."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework import schedules
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import REQUIRED, param

RTOL = 2e-6  # a handful of float32 roundings
STEPS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 19, 20, 21, 100]
FAR = 2**31 + 5


def value(params: schedules.Schedule.Params, step: int) -> float:
    result = params.instantiate()(tf.constant(step, tf.int64))
    assert result.dtype == tf.float32
    assert result.shape == ()
    return float(result)


def linear_warmup(step: int, steps: int, start: float, peak: float) -> float:
    return start + (peak - start) * step / steps


def cosine(step: int) -> float:
    if step < 4:
        return linear_warmup(step, 4, 0.01, 0.3)
    progress = min((step - 4) / (20 - 4), 1.0)
    return 0.05 + (0.3 - 0.05) * 0.5 * (1 + math.cos(math.pi * progress))


def polynomial(step: int) -> float:
    if step < 5:
        return linear_warmup(step, 5, 0.0, 31.2)
    return (31.2 - 1e-4) * (1 - min((step - 5) / 15, 1.0)) ** 2 + 1e-4


def linear(step: int) -> float:
    return 0.5 + (0.1 - 0.5) * min(step, 20) / 20


def transformer(step: int) -> float:
    t = step + 1
    return 512**-0.5 * min(t**-0.5, t * 10**-1.5)


def exponential(step: int) -> float:
    if step < 3:
        return linear_warmup(step, 3, 0.0, 2.0)
    return max(2.0 * 0.7 ** ((step - 3) / 4), 0.25)


def stairs(step: int) -> float:
    return 2.0 * 0.7 ** (step // 4)


def piecewise(step: int) -> float:
    if step < 2:
        return linear_warmup(step, 2, 0.0, 1.0)
    return 1.0 if step < 6 else 0.1 if step < 20 else 0.01


def sequence(step: int) -> float:
    if step < 6:
        return 0.4
    if step < 12:
        return linear_warmup(min(step - 6, 2), 2, 0.0, 0.9)
    return 0.2 * max(1 - (step - 12) / 8, 0.0)


CASES: dict[str, tuple[schedules.Schedule.Params, Callable[[int], float]]] = {
    "constant": (schedules.Constant.Params(value=0.3), lambda step: 0.3),
    "constant_warmup": (
        schedules.Constant.Params(value=0.3, warmup_steps=7),
        lambda step: linear_warmup(min(step, 7), 7, 0.0, 0.3),
    ),
    "linear": (
        schedules.Linear.Params(initial_value=0.5, final_value=0.1, total_steps=20),
        linear,
    ),
    "polynomial": (
        schedules.Polynomial.Params(
            initial_value=31.2, final_value=1e-4, total_steps=20, power=2.0, warmup_steps=5
        ),
        polynomial,
    ),
    "cosine": (
        schedules.Cosine.Params(
            initial_value=0.3,
            final_value=0.05,
            total_steps=20,
            warmup_steps=4,
            warmup_initial_value=0.01,
        ),
        cosine,
    ),
    "transformer": (
        schedules.InverseSquareRoot.Params(model_dim=512, warmup_steps=10),
        transformer,
    ),
    "transformer_without_warmup": (
        schedules.InverseSquareRoot.Params(model_dim=4, warmup_steps=0, scale=3.0),
        lambda step: 3.0 * 4**-0.5 * (step + 1) ** -0.5,
    ),
    "exponential": (
        schedules.Exponential.Params(
            initial_value=2.0, rate=0.7, decay_steps=4, warmup_steps=3, final_value=0.25
        ),
        exponential,
    ),
    "stairs": (
        schedules.Exponential.Params(initial_value=2.0, rate=0.7, decay_steps=4, form="stairs"),
        stairs,
    ),
    "piecewise": (
        schedules.PiecewiseConstant.Params(
            boundaries=[6, 20], values=[1.0, 0.1, 0.01], warmup_steps=2
        ),
        piecewise,
    ),
    "sequence": (
        schedules.Sequence.Params(
            boundaries=[6, 12],
            schedules=[
                schedules.Constant.Params(value=0.4),
                schedules.Constant.Params(value=0.9, warmup_steps=2),
                schedules.Linear.Params(initial_value=0.2, total_steps=8),
            ],
        ),
        sequence,
    ),
    "product": (
        schedules.Product.Params(
            factor=0.1,
            schedules=[
                schedules.Linear.Params(initial_value=0.5, final_value=0.1, total_steps=20),
                schedules.Exponential.Params(initial_value=2.0, rate=0.7, decay_steps=4),
            ],
        ),
        lambda step: 0.1 * linear(step) * 2.0 * 0.7 ** (step / 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule_equals_its_formula(name: str) -> None:
    params, formula = CASES[name]
    schedule = params.instantiate()
    given_values = [float(schedule(tf.constant(step, tf.int64))) for step in STEPS]
    expected = [formula(step) for step in STEPS]
    np.testing.assert_allclose(given_values, expected, rtol=RTOL, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_compiled_schedule_equals_the_plain_one(name: str) -> None:
    schedule = CASES[name][0].instantiate()
    compiled = tf.function(schedule, jit_compile=True, autograph=False)
    for step in (0, 3, 13):
        step_tensor = tf.constant(step, tf.int64)
        np.testing.assert_allclose(compiled(step_tensor), schedule(step_tensor), rtol=RTOL)


@pytest.mark.parametrize("name", CASES)
def test_step_may_be_an_int_or_an_int32_tensor(name: str) -> None:
    schedule = CASES[name][0].instantiate()
    expected = float(schedule(tf.constant(3, tf.int64)))
    assert float(schedule(3)) == expected
    assert float(schedule(tf.constant(3, tf.int32))) == expected
    assert math.isfinite(float(schedule(FAR)))


def test_transformer_peak_is_that_of_the_paper() -> None:
    # The base model: width 512, 4000 steps of warm-up: 512**-0.5 * 4000**-0.5 = 6.9877e-4.
    params = schedules.InverseSquareRoot.Params(model_dim=512)
    assert value(params, 3999) == pytest.approx(6.9877e-4, rel=1e-4)
    assert value(params, 3998) < value(params, 3999) > value(params, 4000)


def test_transformer_warmup_starts_from_the_value_given() -> None:
    params = schedules.InverseSquareRoot.Params(
        model_dim=4, warmup_steps=10, warmup_initial_value=0.1
    )
    peak = 40**-0.5
    np.testing.assert_allclose(value(params, 4), 0.1 + (peak - 0.1) * 5 / 10, rtol=RTOL)


def test_decay_counts_single_steps_beyond_2_to_31() -> None:
    # A float32 holds no odd number there: steps one apart would be equal.
    params = schedules.Linear.Params(initial_value=1.0, total_steps=2**31 + 10)
    values = [value(params, 2**31 + step) for step in range(12)]
    expected = [(10 - step) / (2**31 + 10) if step < 10 else 0.0 for step in range(12)]
    np.testing.assert_allclose(values, expected, rtol=RTOL)


def test_boundary_beyond_2_to_31_is_met_to_the_step() -> None:
    params = schedules.PiecewiseConstant.Params(boundaries=[FAR], values=[1.0, 2.0])
    assert [value(params, FAR + k) for k in (-1, 0, 1)] == [1.0, 2.0, 2.0]


def test_warmup_beyond_2_to_24_is_met_to_the_step() -> None:
    params = schedules.Sequence.Params(
        boundaries=[2**24 + 1],
        schedules=[schedules.Constant.Params(value=1.0), schedules.Constant.Params(value=3.0)],
    )
    assert [value(params, 2**24 + k) for k in (0, 1, 2)] == [1.0, 3.0, 3.0]


def test_inverse_square_root_far_out() -> None:
    params = schedules.InverseSquareRoot.Params(model_dim=1, warmup_steps=4000)
    np.testing.assert_allclose(value(params, FAR), (FAR + 1) ** -0.5, rtol=RTOL)


def test_decay_shorter_than_the_warmup_takes_one_step() -> None:
    params = schedules.Linear.Params(initial_value=1.0, total_steps=3, warmup_steps=5)
    np.testing.assert_allclose(
        [value(params, step) for step in (0, 3, 5, 6, 9)], [0.0, 0.6, 1.0, 0.0, 0.0], rtol=RTOL
    )


DECAYS = st.sampled_from([schedules.Linear, schedules.Polynomial, schedules.Cosine])


@settings(max_examples=60)
@given(
    kind=DECAYS,
    initial=st.floats(1e-6, 100.0),
    share=st.floats(0.0, 1.0),
    warmup=st.integers(0, 50),
    decay=st.integers(1, 10**10),
    step=st.integers(0, 10**10),
)
def test_decay_stays_in_bounds_and_never_rises(
    kind: type[schedules.Decay],
    initial: float,
    share: float,
    warmup: int,
    decay: int,
    step: int,
) -> None:
    params = kind.Params(
        initial_value=initial,
        final_value=initial * share,
        total_steps=warmup + decay,
        warmup_steps=warmup,
    )
    schedule = params.instantiate()
    here, there = float(schedule(warmup + step)), float(schedule(warmup + step + 1))
    slack = initial * 1e-6  # of float32
    assert initial * share - slack <= there <= here + slack <= initial + 2 * slack
    final = float(schedule(warmup + decay))
    np.testing.assert_allclose(final, np.float32(initial * share), rtol=RTOL, atol=1e-30)


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(CASES)), warmup=st.integers(1, 1000), start=st.floats(0, 1))
def test_warmup_rises_in_equal_steps_and_meets_the_schedule(
    name: str, warmup: int, start: float
) -> None:
    params = CASES[name][0].copy().set(warmup_steps=warmup, warmup_initial_value=start)
    schedule = params.instantiate()
    # The Transformer's steps count from 1, all others from 0.
    first = -1 if name.startswith("transformer") else 0
    peak = float(schedule(first + warmup))
    for step in {max(first, 0), warmup // 2, warmup - 1} - {warmup}:
        expected = linear_warmup(step - first, warmup, start, peak)
        np.testing.assert_allclose(float(schedule(step)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (schedules.Constant.Params(value=1.0, warmup_steps=-1), "warmup_steps is -1"),
        (schedules.Linear.Params(initial_value=1.0, total_steps=0), "total_steps is 0"),
        (
            schedules.Polynomial.Params(initial_value=1.0, total_steps=2, power=0.0),
            "power is 0.0",
        ),
        (schedules.Exponential.Params(initial_value=1.0, rate=0.0), "rate is 0.0"),
        (
            schedules.Exponential.Params(initial_value=1.0, rate=0.5, decay_steps=0),
            "decay_steps is 0",
        ),
        (schedules.InverseSquareRoot.Params(model_dim=0), "model_dim is 0"),
        (schedules.PiecewiseConstant.Params(boundaries=[3], values=[1.0]), "1 values need 0"),
        (
            schedules.PiecewiseConstant.Params(boundaries=[3, 3], values=[1.0, 2.0, 3.0]),
            "must be ascending",
        ),
        (
            schedules.Sequence.Params(
                boundaries=[3], schedules=[schedules.Constant.Params(value=1.0)]
            ),
            "1 schedules need 0",
        ),
    ],
)
def test_impossible_params_are_refused(params: schedules.Schedule.Params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params.instantiate()


def test_decays_left_open_end_with_the_run_wherever_they_are() -> None:
    inner = schedules.Product.Params(
        schedules=[
            schedules.Cosine.Params(initial_value=1.0),
            schedules.Linear.Params(initial_value=1.0, total_steps=7),
        ]
    )
    learner = Learner.Params(optimizer=SGD.Params(), schedule=inner)
    ended = schedules.end_with_run(learner, 30)
    assert [s.total_steps for s in ended.schedule.schedules] == [30, 7]
    assert learner.schedule.schedules[0].total_steps is REQUIRED


@pytest.mark.parametrize(
    ("params", "path"),
    [
        (schedules.Constant.Params(value=-0.1), "value is -0.1"),
        (schedules.Cosine.Params(initial_value=-0.1, total_steps=5), "initial_value is -0.1"),
        (
            schedules.PiecewiseConstant.Params(boundaries=[3], values=[0.1, -1.0]),
            "values is [0.1, -1.0]",
        ),
    ],
)
def test_negative_rates_are_refused_by_path(params: schedules.Schedule.Params, path: str) -> None:
    with pytest.raises(ValueError, match="a learning rate cannot be negative") as error:
        params.instantiate()
    assert path in str(error.value)


class Shifted(schedules.Schedule):
    """A schedule of a user's, whose fields mean what the user says."""

    class Params(schedules.Schedule.Params):
        """Params of Shifted."""

        value: float = param("An offset.", default=-0.5)
        scale: float | None = param("A factor.", default=None)

    def value(self, step: Any) -> Any:
        return 1.0 + self.params.value


def test_fields_of_schedules_of_ones_own_may_be_negative() -> None:
    assert Shifted.Params().instantiate().params.value == -0.5
