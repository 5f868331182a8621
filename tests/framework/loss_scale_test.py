"""Dynamic loss scaling against a plain loop, and where float16 is refused without it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.step import Step, unscaled
from tekso.framework.learner import Learner
from tekso.framework.loss_scale import FINITE_STEPS, SCALE, LossScale
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_doubles_after_finite_steps_and_halves_after_others(finite: list[bool], n: int) -> None:
    scaling = LossScale.Params(initial=8.0, growth_steps=n, largest=32.0).instantiate()
    slots = {path: tf.constant(spec.initial_value(0)) for path, spec in scaling.slots().items()}
    scale, steps = 8.0, 0
    for is_finite in finite:
        slots = scaling.updated(slots, tf.constant(is_finite))
        steps = steps + 1 if is_finite else 0
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


def test_float16_needs_a_loss_scale() -> None:
    sizes = {"input_dim": 3, "output_dim": 2, "hidden_dims": [5]}
    task = Classification.Params(num_classes=2, model=Mlp.Params(**sizes)).instantiate()
    with pytest.raises(ExecutionError, match=r"float16, .* --set learner.loss_scale=LossScale, or"):
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
