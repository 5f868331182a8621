"""Learner: the step around the optimizer, against NumPy, stacked and compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from learner_updates import (
    SPECS,
    TRAINABLE,
    Array,
    Update,
    assert_equal,
    initial_slots,
    make_learner,
    make_spec,
    norm,
    random_tensors,
    run,
    updated,
)
from sampling import sample

from tekso.framework import optimizers, schedules
from tekso.framework.learner import Learner

# Slots.


def test_slots_are_those_of_the_optimizer_the_average_and_three_counters() -> None:
    learner = make_learner(optimizers.Momentum.Params(), ema_decay=0.9)
    slots = learner.slots(SPECS)
    expected = {f"{path}/{name}" for path in TRAINABLE for name in ("velocity", "ema")}
    counters = {"nonfinite/total", "nonfinite/consecutive", "updates/applied"}
    assert set(slots) == expected | counters
    for path, spec in slots.items():
        assert spec.path == path
        assert spec.initial_value(0).dtype == spec.dtype
    assert slots["stack/w/ema"].dims == ("layers", None, None)
    assert (slots["nonfinite/total"].shape, slots["nonfinite/total"].dtype) == ((), "int64")


def test_update_returns_what_it_was_given_in_shape_and_dtype() -> None:
    specs = {**SPECS, "half": make_spec("half", (4, 2), dtype="bfloat16")}
    learner = make_learner(optimizers.Adam.Params(), ema_decay=0.9, clip_global_norm=1.0)
    made = run(learner, [random_tensors(1, specs)], specs)[0]
    assert made.weights.keys() == specs.keys()
    for path, spec in specs.items():
        assert (made.weights[path].shape, made.weights[path].dtype) == (spec.shape, spec.dtype)
    for path, spec in learner.slots(specs).items():
        assert (made.slots[path].shape, made.slots[path].dtype) == (spec.shape, spec.dtype)
    assert made.slots.keys() == learner.slots(specs).keys()
    for value in made.metrics.values():
        assert (value.shape, value.dtype) == ((), tf.float32)


# One learner.


def test_adam_with_a_schedule_equals_numpy_over_six_steps() -> None:
    params = Learner.Params(
        optimizer=optimizers.Adam.Params(epsilon=1e-6),
        schedule=schedules.Linear.Params(initial_value=0.2, total_steps=10, warmup_steps=3),
    )
    gradients = [random_tensors(seed) for seed in range(1, 7)]
    updates = run(params.instantiate(), gradients)
    w = np.float64(random_tensors(0)["stack/w"])
    m = v = np.zeros_like(w)
    for step, (made, gradient) in enumerate(zip(updates, gradients, strict=True)):
        g = np.float64(gradient["stack/w"])
        rate = 0.2 * step / 3 if step < 3 else 0.2 * (10 - step) / 7
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
        w = w - rate * m_hat / (np.sqrt(v_hat) + 1e-6)
        # float32 rounding of numbers of about 1, six times.
        np.testing.assert_allclose(made.weights["stack/w"], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(made.metrics["learning_rate"], rate, rtol=1e-6)
        expected = norm(gradient, TRAINABLE)
        np.testing.assert_allclose(made.metrics["gradient_norm"], expected, rtol=1e-6)


def test_weights_that_are_not_trainable_stay() -> None:
    made = run(make_learner(), [random_tensors(1)])[0]
    np.testing.assert_array_equal(made.weights["norm/mean"], random_tensors(0)["norm/mean"])


def test_sparse_gradient_equals_the_dense_one() -> None:
    gradients = random_tensors(1)
    rows, values = [5, 1, 5], np.arange(9, dtype=np.float32).reshape(3, 3)
    dense = np.zeros((7, 3), np.float32)
    np.add.at(dense, rows, values)
    sparse = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([7, 3]))
    learner = make_learner(optimizers.Adam.Params())
    given = run(learner, [{**gradients, "embedding/w": sparse}])[0]
    expected = run(learner, [{**gradients, "embedding/w": tf.constant(dense)}])[0]
    assert_equal(given.weights, expected.weights)


@pytest.mark.parametrize("optimizer", ["Adam", "Adafactor", "LAMB", "LARS", "RMSProp"])
def test_stack_learns_as_its_layers_do(optimizer: str) -> None:
    def learner() -> Learner:
        params = getattr(optimizers, optimizer).Params()
        return make_learner(
            params, clip_tensor_norm=1.5, clip_global_norm=2.0, ema_decay=0.9, ema_start="ramp"
        )

    stacked_specs = {"w": make_spec("w", (2, 3, 5), stacked=1), "b": make_spec("b", (4,))}
    layer_specs = {"b": make_spec("b", (4,))}
    layer_specs |= {f"{i}/w": make_spec(f"{i}/w", (3, 5)) for i in range(2)}

    def unroll(tensors: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        return {"b": tensors["b"], "0/w": tensors["w"][0], "1/w": tensors["w"][1]}

    gradients = [random_tensors(seed, stacked_specs) for seed in range(1, 6)]
    gradients = [{**g, "w": g["w"] * [[[1.0]], [[0.01]]]} for g in gradients]
    weights = random_tensors(0, stacked_specs)
    rolled = run(learner(), gradients, stacked_specs, weights)
    unrolled = run(learner(), [unroll(g) for g in gradients], layer_specs, unroll(weights))
    for one, other in zip(rolled, unrolled, strict=True):
        # The norm of all gradients is summed in another order.
        assert_equal(unroll(one.weights), other.weights, rtol=1e-5)
        assert_equal(one.metrics, other.metrics, rtol=1e-6)


# Clipping.


def test_global_clipping_scales_all_gradients_by_one_factor() -> None:
    gradients = random_tensors(1)
    total = norm(gradients, TRAINABLE)
    made = run(make_learner(rate=1.0, clip_global_norm=0.5), [gradients])[0]
    for path in TRAINABLE:
        expected = random_tensors(0)[path] - gradients[path] * (0.5 / total)
        np.testing.assert_allclose(made.weights[path], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.metrics["gradient_norm"], total, rtol=1e-6)


def test_gradients_below_the_limit_are_not_touched() -> None:
    gradients = random_tensors(1)
    plain = run(make_learner(), [gradients])[0]
    limits = {"clip_global_norm": norm(gradients, TRAINABLE) * 1.01, "clip_tensor_norm": 100.0}
    assert_equal(run(make_learner(**limits), [gradients])[0].weights, plain.weights)


def test_tensor_clipping_takes_each_layer_of_a_stack_for_itself() -> None:
    gradients = random_tensors(1)
    gradients["stack/w"] *= [[[10.0]], [[0.01]]]
    made = run(make_learner(rate=1.0, clip_tensor_norm=0.7), [gradients])[0]
    before = random_tensors(0)
    for index in range(2):
        g = np.float64(gradients["stack/w"][index])
        expected = before["stack/w"][index] - g * min(1.0, 0.7 / np.linalg.norm(g))
        np.testing.assert_allclose(made.weights["stack/w"][index], expected, rtol=1e-5, atol=1e-6)
    g = np.float64(gradients["scale"])
    expected = before["scale"] - g * min(1.0, 0.7 / abs(g))
    np.testing.assert_allclose(made.weights["scale"], expected, rtol=1e-5, atol=1e-6)


def test_global_clipping_sees_what_tensor_clipping_leaves() -> None:
    gradients = random_tensors(1)
    made = run(make_learner(rate=1.0, clip_tensor_norm=0.7, clip_global_norm=1.1), [gradients])[0]
    parts = {"embedding/w": 1, "stack/w": 2, "stack/bias": 2, "scale": 1}
    clipped: dict[str, Array] = {}
    for path, layers in parts.items():
        g = np.float64(gradients[path]).reshape(layers, -1)
        g = g * np.minimum(1.0, 0.7 / np.linalg.norm(g, axis=1, keepdims=True))
        clipped[path] = g.reshape(gradients[path].shape)
    factor = min(1.0, 1.1 / norm(clipped, TRAINABLE))
    for path in TRAINABLE:
        expected = random_tensors(0)[path] - clipped[path] * factor
        np.testing.assert_allclose(made.weights[path], expected, rtol=1e-5, atol=1e-6)


def test_zero_gradients_are_clipped_to_zero() -> None:
    zeros = {path: tf.zeros(spec.shape) for path, spec in SPECS.items()}
    made = run(make_learner(clip_tensor_norm=1.0, clip_global_norm=1.0), [zeros])[0]
    assert_equal(made.weights, random_tensors(0))
    assert float(made.metrics["gradient_norm"]) == 0.0


# Moving averages.


@pytest.mark.parametrize("start", ["constant", "ramp"])
def test_moving_average_equals_numpy(start: str) -> None:
    learner = make_learner(ema_decay=0.8, ema_start=start)
    updates = run(learner, [random_tensors(seed) for seed in range(1, 31)])
    average = np.float64(random_tensors(0)["stack/w"])
    for n, made in enumerate(updates):
        decay = min(0.8, (1 + n) / (10 + n)) if start == "ramp" else 0.8
        average = decay * average + (1 - decay) * np.float64(made.weights["stack/w"])
        np.testing.assert_allclose(made.slots["stack/w/ema"], average, rtol=1e-5, atol=1e-6)


def test_evaluation_takes_the_average_where_one_is_kept() -> None:
    learner = make_learner(ema_decay=0.8, frozen=["stack/bias"])
    weights = random_tensors(0)
    before = learner.evaluation_weights(weights, initial_slots(learner))
    assert_equal(before, weights)
    made = run(learner, [random_tensors(1)])[0]
    for path, value in learner.evaluation_weights(made.weights, made.slots).items():
        averaged = path in TRAINABLE and path != "stack/bias"
        expected = made.slots[f"{path}/ema"] if averaged else made.weights[path]
        np.testing.assert_array_equal(value, expected)


def test_evaluation_without_averages_takes_the_weights() -> None:
    made = run(make_learner(), [random_tensors(1)])[0]
    assert_equal(make_learner().evaluation_weights(made.weights, made.slots), made.weights)


def test_average_of_a_bfloat16_weight_is_kept_in_float32() -> None:
    specs = {"w": make_spec("w", (3, 5), dtype="bfloat16")}
    learner = make_learner(ema_decay=0.99)
    made = run(learner, [random_tensors(seed, specs) for seed in range(1, 6)], specs)[-1]
    assert made.slots["w/ema"].dtype == tf.float32
    assert learner.evaluation_weights(made.weights, made.slots)["w"].dtype == tf.bfloat16


# Steps far out, compilation, freezing, Params.


def test_step_beyond_2_to_31_follows_the_schedule() -> None:
    params = Learner.Params(
        optimizer=optimizers.SGD.Params(),
        schedule=schedules.PiecewiseConstant.Params(boundaries=[2**31 + 6], values=[1.0, 0.5]),
    )
    updates = run(params.instantiate(), [random_tensors(1)] * 2, first_step=2**31 + 5)
    assert [float(made.metrics["learning_rate"]) for made in updates] == [1.0, 0.5]


@pytest.mark.parametrize(
    "optimizer", sample(sorted(set(optimizers.__all__) - {"Optimizer"}), quick=["Adam", "LAMB"])
)
def test_update_compiled_as_one_cluster_equals_the_plain_one(optimizer: str) -> None:
    learner = make_learner(
        getattr(optimizers, optimizer).Params(),
        clip_global_norm=1.0,
        clip_tensor_norm=0.8,
        ema_decay=0.9,
    )

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*tensors: Any) -> Update:
        return updated(learner, SPECS, *tensors)

    weights, slots = random_tensors(0), initial_slots(learner)
    for step in range(3):
        gradients = random_tensors(step + 1)
        inputs = (weights, gradients, slots, tf.constant(step, tf.int64))
        given, expected = compiled(*inputs), updated(learner, SPECS, *inputs)
        # Fused multiply-adds and another order of sums: a few units of the last place.
        for one, other in zip(given, expected, strict=True):
            for path in other:
                np.testing.assert_allclose(one[path], other[path], rtol=2e-5, atol=1e-6)
        weights, slots = expected.weights, expected.slots


def test_compiled_update_skips_and_counts() -> None:
    learner = make_learner(optimizers.Adam.Params())
    compiled = tf.function(
        lambda *tensors: updated(learner, SPECS, *tensors), jit_compile=True, autograph=False
    )
    weights, slots = random_tensors(0), initial_slots(learner)
    gradients = {**random_tensors(1), "scale": tf.constant(math.nan)}
    made = compiled(weights, gradients, slots, tf.constant(0, tf.int64))
    assert_equal(made.weights, weights)
    assert int(made.slots["nonfinite/consecutive"]) == 1


def test_frozen_weights_have_no_slots_and_need_no_gradient() -> None:
    learner = make_learner(optimizers.Adam.Params(), frozen=["stack/.*"], ema_decay=0.5)
    assert list(learner.trainable(SPECS)) == ["embedding/w", "scale"]
    assert not [path for path in learner.slots(SPECS) if path.startswith("stack/")]
    gradients = {path: random_tensors(1)[path] for path in ("embedding/w", "scale")}
    made = run(learner, [gradients])[0]
    weights = random_tensors(0)
    for path in SPECS:
        changed = not np.array_equal(made.weights[path], weights[path])
        assert changed == (path in gradients), path
    np.testing.assert_allclose(
        made.metrics["gradient_norm"], norm(gradients, list(gradients)), rtol=1e-6
    )


def test_a_model_without_weights_is_an_error_that_says_what_a_weight_is() -> None:
    message = r"the model has no weights to train: .* tf.Variables and Keras layers"
    with pytest.raises(ValueError, match=message):
        make_learner().slots({})


def test_frozen_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Learner.frozen: 'stack' matches no weight.*stack/w"):
        make_learner(frozen=["stack"]).slots(SPECS)
    with pytest.raises(ValueError, match="no weight is left to train"):
        make_learner(frozen=[".*"]).slots(SPECS)


def test_decay_exclusion_of_which_nothing_matches_is_refused() -> None:
    decay = {"weight_decay": 0.1}
    some = optimizers.SGD.Params(weight_decay_exclude=[".*/bias", ".*/offset"], **decay)
    make_learner(some).slots(SPECS)
    none = optimizers.SGD.Params(weight_decay_exclude=["bias"], **decay)
    with pytest.raises(ValueError, match=r"SGD.weight_decay_exclude: 'bias' matches no weight"):
        make_learner(none).slots(SPECS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("accumulation_steps", 0),
        ("max_consecutive_nonfinite_steps", 0),
        ("max_rollbacks", -1),
        ("clip_global_norm", 0.0),
        ("clip_tensor_norm", -1.0),
        ("ema_decay", 1.0),
    ],
)
def test_impossible_params_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"Learner: {field} is {value}, but must be"):
        make_learner(**{field: value})


def test_accumulation_is_left_to_the_execution() -> None:
    learner = make_learner(accumulation_steps=4)
    assert learner.params.accumulation_steps == 4
    gradients = [random_tensors(1)]
    assert_equal(run(learner, gradients)[0].weights, run(make_learner(), gradients)[0].weights)


def test_a_schedule_may_return_a_number() -> None:
    class Plain(schedules.Constant):
        def __call__(self, step: Any) -> Any:
            return 0.1

    learner = make_learner().params.copy().set(schedule=Plain.Params(value=1.0)).instantiate()
    (made,) = run(learner, [random_tensors(1)])
    assert float(made.metrics["learning_rate"]) == pytest.approx(0.1)
