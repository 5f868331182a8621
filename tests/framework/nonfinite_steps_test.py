"""Learner: steps whose loss or gradients are not finite change nothing, and stop a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from learner_updates import (
    SPECS,
    assert_equal,
    initial_slots,
    make_learner,
    random_tensors,
    run,
    updated,
)

from tekso.framework import optimizers
from tekso.framework.learner import NonFiniteStepsError


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_step_with_one_bad_element_changes_nothing_but_the_counters(bad: float) -> None:
    learner = make_learner(
        optimizers.Adam.Params(weight_decay=0.1), ema_decay=0.9, clip_global_norm=1.0
    )
    poisoned = random_tensors(2)
    poisoned["stack/w"] = tf.tensor_scatter_nd_update(poisoned["stack/w"], [[1, 2, 3]], [bad])
    first, second = run(learner, [random_tensors(1), poisoned])
    assert_equal(second.weights, first.weights)
    counters = {"nonfinite/total", "nonfinite/consecutive"}
    kept = [path for path in first.slots if path not in counters]
    assert_equal({p: second.slots[p] for p in kept}, {p: first.slots[p] for p in kept})
    assert float(second.metrics["nonfinite_total"]) == 1.0
    assert not math.isfinite(float(second.metrics["gradient_norm"]))


def test_skipped_steps_leave_no_trace_in_later_ones() -> None:
    learner = make_learner(optimizers.Adam.Params(), ema_decay=0.9, ema_start="ramp")
    bad = {path: value * math.nan for path, value in random_tensors(9).items()}
    good = [random_tensors(1), random_tensors(2)]
    with_bad = run(learner, [bad, bad, good[0], bad, good[1]])
    without = run(learner, good)
    assert_equal(with_bad[-1].weights, without[-1].weights)
    totals = [int(made.metrics["nonfinite_total"]) for made in with_bad]
    consecutive = [int(made.metrics["nonfinite_consecutive"]) for made in with_bad]
    assert totals == [1, 2, 2, 3, 3]
    assert consecutive == [1, 2, 0, 1, 0]


@pytest.mark.parametrize(("loss", "skipped"), [(math.nan, 1), (math.inf, 1), (3.5, 0)])
def test_loss_that_is_not_finite_skips_the_step(loss: float, skipped: int) -> None:
    learner = make_learner()
    weights = random_tensors(0)
    step = tf.constant(0, tf.int64)
    slots = initial_slots(learner)
    made = updated(learner, SPECS, weights, random_tensors(1), slots, step, loss=loss)
    assert int(made.metrics["nonfinite_total"]) == skipped
    assert np.array_equal(made.weights["stack/w"], weights["stack/w"]) == bool(skipped)


def test_bad_gradient_of_a_frozen_weight_does_not_matter() -> None:
    learner = make_learner(frozen=["scale"])
    gradients = {**random_tensors(1), "scale": tf.constant(math.nan)}
    assert int(run(learner, [gradients])[0].metrics["nonfinite_total"]) == 0


def test_check_stops_after_the_number_of_steps_that_is_set() -> None:
    learner = make_learner(rate=0.25, max_consecutive_nonfinite_steps=3)
    bad = {path: value * math.inf for path, value in random_tensors(1).items()}
    updates = run(learner, [random_tensors(1), bad, bad, bad])
    for made in updates[:3]:
        learner.check(made.metrics)
    with pytest.raises(NonFiniteStepsError, match=r"3 consecutive steps .*learning rate is 0\.25"):
        learner.check(updates[3].metrics)
