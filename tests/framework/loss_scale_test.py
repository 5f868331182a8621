"""Dynamic loss scaling against a plain loop, and where float16 is refused without it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework.initializers import Zeros
from tekso.framework.learner import Learner
from tekso.framework.learning_step import NonFiniteStepsError
from tekso.framework.loss_scale import FINITE_STEPS, SCALE, LossScale
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant
from tekso.framework.step import Step, unscaled
from tekso.framework.weight_spec import WeightSpec
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
@settings(max_examples=40)
def test_doubles_after_finite_steps_and_halves_after_others(finite: list[bool], n: int) -> None:
    scaling = LossScale.Params(initial=8.0, growth_steps=n, largest=32.0).instantiate()
    slots = {path: tf.constant(spec.initial_value(0)) for path, spec in scaling.slots().items()}
    scale, steps = 8.0, 0
    for is_finite in finite:
        slots = scaling.updated(slots, tf.constant(is_finite))
        if is_finite:
            steps = max(steps, 0) + 1
        else:
            steps = min(steps, 0) - (scale == 1)
            assert int(scaling.skipped_steps(slots)) == -steps
        if not is_finite:
            scale = max(scale / 2, 1.0)
        elif steps == n:
            scale, steps = min(scale * 2, 32.0), 0
        assert (float(slots[SCALE]), int(slots[FINITE_STEPS])) == (scale, steps)


def test_a_gradient_below_the_smallest_float16_survives() -> None:
    tiny = 2.0**-30
    assert np.float16(tiny) == 0
    scaled = tf.constant(tiny * 2.0**15, tf.float16)
    found = unscaled(scaled, tf.constant(2.0**15))
    assert found.dtype == tf.float32 and float(found) == tiny
    assert np.isinf(unscaled(tf.constant(np.inf, tf.float16), tf.constant(2.0**15)))


def learner(**changes: object) -> Learner:
    params = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    built: Learner = params.set(**changes).instantiate()
    return built


def rolls_back_after(loss: float, gradient: float, **changes: object) -> tuple[int, float]:
    """Returns how many steps are skipped until the run is rolled back, and the last scale."""
    made = learner(**{"loss_scale": LossScale.Params(), **changes})
    weight = WeightSpec("w", (1,), (None,), Zeros.Params().instantiate())
    groups = made.groups({"w": weight})
    counts = {path: tf.constant(s.initial_value(0)) for path, s in made.counters().items()}
    norms = {"w": (tf.constant(gradient), tf.constant(gradient))}
    for step in range(99):
        decided = made.decide(groups, norms, counts, tf.constant(step), loss=tf.constant(loss))
        counts |= decided.counts
        try:
            made.check(decided.metrics)
        except NonFiniteStepsError:
            return step + 1, float(counts[SCALE])
    return 0, float(counts[SCALE])


def test_skipped_steps_count_when_the_scale_is_not_their_cause() -> None:
    assert rolls_back_after(1.0, np.inf) == (15 + 10, 1.0)  # 2^15 is halved 15 times
    assert rolls_back_after(np.nan, np.inf) == (10, 2.0**5)
    small = {"loss_scale": LossScale.Params(initial=2.0), "max_consecutive_nonfinite_steps": 3}
    assert rolls_back_after(1.0, np.nan, **small) == (1 + 3, 1.0)
    assert rolls_back_after(1.0, 1.0) == (0, 2.0**15)


def test_float16_needs_a_loss_scale() -> None:
    sizes = {"input_dim": 3, "output_dim": 2, "hidden_dims": [5]}
    task = Classification.Params(num_classes=2, model=Mlp.Params(**sizes)).instantiate()
    with pytest.raises(ValueError, match=r"float16, .* --set learner.loss_scale=LossScale, or"):
        Step(task, learner(), seed=0, dtype="float16")
    assert Step(task, learner(loss_scale=LossScale.Params()), seed=0, dtype="float16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": 0.5}, "initial is 0.5 and largest is .* 1 <= initial"),
        ({"initial": 64.0, "largest": 32.0}, "initial is 64 and largest is 32"),
        ({"growth_steps": 0}, "growth_steps is 0, but must be at least 1"),
    ],
)
def test_scales_that_make_no_sense_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale.Params(**changes).instantiate()
