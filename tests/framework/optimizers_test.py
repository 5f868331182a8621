"""Every optimizer over several steps against its formula, written again in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from optimizer_formulas import (
    ALL,
    CASES,
    NUM_STEPS,
    data,
    initial_slots,
    make_spec,
    nesterov,
    run,
)

from tekso.framework import optimizers


@pytest.mark.parametrize("name", CASES)
def test_optimizer_equals_its_formula_in_float64(name: str) -> None:
    params, reference = CASES[name]
    weight, gradients = data((3, 5))
    given = run(params, make_spec((3, 5)), weight, gradients)
    # float64 throughout; 1 - beta**t goes another way, so the last digits differ.
    np.testing.assert_allclose(given, list(reference(weight, gradients)), rtol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_optimizer_equals_its_formula_in_float32(name: str) -> None:
    params, reference = CASES[name]
    weight, gradients = data((3, 5), seed=1)
    given = run(params, make_spec((3, 5), dtype="float32"), weight, gradients)
    assert given[0].dtype == np.float32
    # Six steps of float32 rounding on numbers of about 1.
    np.testing.assert_allclose(given, list(reference(weight, gradients)), rtol=1e-5, atol=3e-6)


def test_nesterov_equals_sutskevers_form_at_a_constant_rate() -> None:
    weight, gradients = data((3, 5))
    params = optimizers.Nesterov.Params(momentum=0.7)
    given = run(params, make_spec((3, 5)), weight, gradients, rates=[0.1] * NUM_STEPS)
    np.testing.assert_allclose(given, list(nesterov(weight, gradients, 0.1)), rtol=1e-11)


@pytest.mark.parametrize("name", ALL)
def test_stacked_weight_learns_like_its_layers(name: str) -> None:
    # The norms of the layers are far apart, so one taken over all of them would show.
    params = ALL[name]
    weight, gradients = data((2, 3, 4, 5))
    sizes = np.reshape([1.0, 100.0, 1e-3, 5.0, 0.2, 30.0], (2, 3, 1, 1))
    weight, gradients = weight * sizes, [g / sizes for g in gradients]
    stacked = run(params, make_spec((2, 3, 4, 5), stacked=2), weight, gradients)
    for index in np.ndindex(2, 3):
        alone = run(params, make_spec((4, 5)), weight[index], [g[index] for g in gradients])
        np.testing.assert_allclose([w[index] for w in stacked], alone, rtol=1e-11)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4)])
@pytest.mark.parametrize("name", ALL)
def test_weight_of_any_rank_keeps_its_shape(name: str, shape: tuple[int, ...]) -> None:
    params = ALL[name]
    weight, gradients = data(shape)
    for w in run(params, make_spec(shape), weight, gradients):
        assert w.shape == shape
        assert np.all(np.isfinite(w))


@pytest.mark.parametrize("name", ALL)
def test_zero_gradients_and_zero_weights_stay_finite(name: str) -> None:
    params = ALL[name]
    for weight in (np.zeros((3, 5)), np.ones((3, 5))):
        for w in run(params, make_spec((3, 5), dtype="float32"), weight, [np.zeros((3, 5))] * 3):
            assert np.all(np.isfinite(w))
            if not params.weight_decay:
                np.testing.assert_array_equal(w, weight)


@pytest.mark.parametrize("name", ALL)
def test_zero_weight_leaves_zero(name: str) -> None:
    params = ALL[name]
    history = run(params, make_spec((3, 5)), np.zeros((3, 5)), [np.ones((3, 5))] * 2)
    assert np.all(history[0] < 0)


@pytest.mark.parametrize("step", [0, 2**31 + 5])
@pytest.mark.parametrize("name", ALL)
def test_first_and_very_late_steps_are_finite(name: str, step: int) -> None:
    optimizer = ALL[name].instantiate()
    spec = make_spec((3, 5), dtype="float32")
    weight, gradients = data((3, 5))
    slots = {k: tf.ones(s.shape) for k, s in optimizer.slots(spec).items()}
    w, new_slots = optimizer.update(
        spec,
        tf.constant(weight, tf.float32),
        tf.constant(gradients[0], tf.float32),
        slots,
        tf.constant(0.1),
        tf.constant(step, tf.int64),
    )
    assert np.all(np.isfinite(w)) and not np.all(w == np.float32(weight))
    assert all(np.all(np.isfinite(value)) for value in new_slots.values())


def test_adam_far_out_has_no_bias_correction() -> None:
    optimizer = optimizers.Adam.Params().instantiate()
    w, _ = optimizer.update(
        make_spec((2,), dtype="float32"),
        tf.constant([1.0, 2.0]),
        tf.constant([3.0, -4.0]),
        {"first_moment": tf.constant([0.5, 0.1]), "second_moment": tf.constant([4.0, 1.0])},
        tf.constant(0.1),
        tf.constant(2**31 + 5, tf.int64),
    )
    m = np.array([0.9 * 0.5 + 0.1 * 3, 0.9 * 0.1 - 0.1 * 4])
    v = np.array([0.999 * 4 + 0.001 * 9, 0.999 * 1 + 0.001 * 16])
    np.testing.assert_allclose(w, [1.0, 2.0] - 0.1 * m / np.sqrt(v), rtol=1e-6)


def test_adam_first_step_is_the_rate_times_the_sign_in_float32() -> None:
    # 1 - 0.999 in float32 is wrong by 1e-5; the bias correction has to be exact beyond that.
    optimizer = optimizers.Adam.Params(epsilon=1e-20).instantiate()
    spec = make_spec((3,), dtype="float32")
    zero = tf.zeros([3])
    w, _ = optimizer.update(
        spec,
        zero,
        tf.constant([1e-3, -2.0, 50.0]),
        initial_slots(optimizer, spec),
        tf.constant(1.0),
        tf.constant(0, tf.int64),
    )
    np.testing.assert_allclose(w, [-1.0, 1.0, -1.0], rtol=5e-7)


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_weight_is_updated_in_float32(name: str) -> None:
    params = ALL[name]
    spec = make_spec((3, 5), dtype="bfloat16")
    weight, gradients = data((3, 5))
    optimizer = params.instantiate()
    slots = initial_slots(optimizer, spec)
    assert all(value.dtype == tf.float32 for value in slots.values())
    w = tf.cast(weight, tf.bfloat16)
    g = tf.cast(gradients[0], tf.bfloat16)
    step = tf.constant(0, tf.int64)
    new, new_slots = optimizer.update(spec, w, g, slots, tf.constant(0.1), step)
    assert new.dtype == tf.bfloat16
    assert all(value.dtype == tf.float32 for value in new_slots.values())
    wide, wide_slots = optimizer.update(
        make_spec((3, 5), dtype="float32"),
        tf.cast(w, tf.float32),
        tf.cast(g, tf.float32),
        slots,
        tf.constant(0.1),
        step,
    )
    np.testing.assert_array_equal(new, tf.cast(wide, tf.bfloat16))
    for key, value in wide_slots.items():
        np.testing.assert_array_equal(new_slots[key], value)


def test_slots_are_declared_like_the_weight() -> None:
    spec = make_spec((2, 3, 5), stacked=1, dtype="bfloat16")
    for name, params in ALL.items():
        if name == "adafactor":  # its slots have another shape
            continue
        for key, slot in params.instantiate().slots(spec).items():
            assert slot.path == f"ffn/w/{key}", name
            assert (slot.shape, slot.dims) == (spec.shape, spec.dims)
            assert (slot.dtype, slot.trainable, slot.stacked) == ("float32", False, 1)
            assert slot.initial_value(0).shape == spec.shape


@pytest.mark.parametrize("name", ["sgd_decayed", "adamw", "lamb", "lars", "adafactor_decayed"])
def test_excluded_weight_is_not_decayed(name: str) -> None:
    params = CASES[name][0].copy().set(weight_decay_exclude=[".*/bias", "ffn/w"])
    without = CASES[name][0].copy().set(weight_decay=0.0)
    weight, gradients = data((3, 5))
    spec = make_spec((3, 5))
    np.testing.assert_array_equal(
        run(params, spec, weight, gradients), run(without, spec, weight, gradients)
    )
    other = make_spec((3, 5), path="ffn/w2")  # a pattern matches whole paths
    np.testing.assert_array_equal(
        run(params, other, weight, gradients), run(CASES[name][0], other, weight, gradients)
    )


def test_weight_without_trust_takes_plain_steps() -> None:
    weight, gradients = data((3, 5))
    spec = make_spec((3, 5), path="norm/scale")
    lars = optimizers.LARS.Params(
        weight_decay=0.0, momentum_form="scaled", trust_exclude=[".*/scale"]
    )
    np.testing.assert_allclose(
        run(lars, spec, weight, gradients),
        run(optimizers.Momentum.Params(), spec, weight, gradients),
        rtol=1e-12,
    )
    lamb = optimizers.LAMB.Params(weight_decay=0.0, trust_exclude=[".*/scale"])
    np.testing.assert_allclose(
        run(lamb, spec, weight, gradients),
        run(optimizers.Adam.Params(epsilon=1e-6), spec, weight, gradients),
        rtol=1e-12,
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (optimizers.Adam.Params(beta1=1.0), r"Adam: beta1 is 1.0, but must be in \[0, 1\)"),
        (optimizers.Adam.Params(epsilon=0.0), "epsilon is 0.0"),
        (optimizers.Momentum.Params(momentum=-0.1), "momentum is -0.1"),
        (optimizers.SGD.Params(weight_decay=-1.0), "weight_decay is -1.0"),
        (optimizers.Adagrad.Params(initial_sum_of_squares=-1.0), "initial_sum_of_squares"),
        (optimizers.RMSProp.Params(initial_mean_square=-1.0), "initial_mean_square"),
        (optimizers.Adafactor.Params(clipping_threshold=0.0), "clipping_threshold is 0.0"),
        (optimizers.LAMB.Params(min_weight_norm=2.0, max_weight_norm=1.0), "max_weight_norm"),
        (optimizers.LARS.Params(weight_decay_scaling="independent"), "part of its direction"),
        (optimizers.LAMB.Params(weight_decay_scaling="independent"), "part of its direction"),
        (optimizers.LARS.Params(weight_decay_scaling="gradient"), "part of its direction"),
        (
            optimizers.AdamW.Params(weight_decay_exclude=["(bias"]),
            r"AdamW.weight_decay_exclude: '\(bias' is not a valid regular expression",
        ),
    ],
)
def test_impossible_params_are_refused(params: optimizers.Optimizer.Params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params.instantiate()
