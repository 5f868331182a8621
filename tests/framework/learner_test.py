"""Learner: the step around the optimizer, against NumPy, stacked, compiled, and split in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from learner_updates import Update, updated
from sampling import sample

from tekso.framework import initializers, optimizers, schedules
from tekso.framework.learner import Learner, LearnerBase, MultiLearner, NonFiniteStepsError
from tekso.framework.loss_scale import LossScale
from tekso.framework.primitives.fusion import XlaFusion
from tekso.framework.weight_spec import WeightSpec

ZEROS = initializers.Zeros.Params().instantiate()
Array = np.ndarray[Any, Any]


def make_spec(
    path: str, shape: tuple[int, ...], *, stacked: int = 0, dtype: str = "float32", **kwargs: Any
) -> WeightSpec:
    dims = ("layers",) * stacked + (None,) * (len(shape) - stacked)
    return WeightSpec(
        path, shape, dims, ZEROS, stacked=stacked, dtype=dtype, template=path, **kwargs
    )


SPECS = {
    spec.path: spec
    for spec in (
        make_spec("embedding/w", (7, 3)),
        make_spec("stack/w", (2, 3, 5), stacked=1),
        make_spec("stack/bias", (2, 5), stacked=1),
        make_spec("scale", ()),
        make_spec("norm/mean", (3,), trainable=False),
    )
}
TRAINABLE = [path for path, spec in SPECS.items() if spec.trainable]


def constant(value: float) -> schedules.Constant.Params:
    return schedules.Constant.Params(value=value)


def make_learner(
    optimizer: optimizers.Optimizer.Params | None = None, rate: float = 0.1, **fields: Any
) -> Learner:
    params = Learner.Params(
        optimizer=optimizer or optimizers.SGD.Params(), schedule=constant(rate), **fields
    )
    return params.instantiate()


def random_tensors(seed: int, specs: Mapping[str, WeightSpec] = SPECS) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(seed)
    return {p: tf.cast(rng.normal(size=s.shape), s.dtype) for p, s in specs.items()}


def initial_slots(
    learner: LearnerBase, specs: Mapping[str, WeightSpec] = SPECS
) -> dict[str, tf.Tensor]:
    return {p: tf.constant(s.initial_value(0)) for p, s in learner.slots(specs).items()}


def run(
    learner: LearnerBase,
    gradients: list[dict[str, tf.Tensor]],
    specs: Mapping[str, WeightSpec] = SPECS,
    weights: dict[str, tf.Tensor] | None = None,
    first_step: int = 0,
) -> list[Update]:
    weights = weights or random_tensors(0, specs)
    slots = initial_slots(learner, specs)
    updates = []
    for step, gradient in enumerate(gradients, start=first_step):
        made = updated(learner, specs, weights, gradient, slots, tf.constant(step, tf.int64))
        weights, slots = made.weights, made.slots
        updates.append(made)
    return updates


def assert_equal(given: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 0.0) -> None:
    assert given.keys() == expected.keys()
    for path in given:
        np.testing.assert_allclose(given[path], expected[path], rtol=rtol, err_msg=path)


def norm(tensors: Mapping[str, Any], paths: list[str]) -> float:
    return math.sqrt(sum(np.sum(np.float64(tensors[path]) ** 2) for path in paths))


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


# Steps that are not finite.


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


def test_a_model_without_weights_is_told_what_a_weight_is() -> None:
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


# Several learners.


def make_multi(**fields: Any) -> MultiLearner:
    values: dict[str, Any] = {
        "patterns": {"embedding": "embedding/.*", "rest": "(?!embedding/).*"},
        "learners": {
            "embedding": Learner.Params(
                optimizer=optimizers.Adagrad.Params(), schedule=constant(0.2)
            ),
            "rest": Learner.Params(
                optimizer=optimizers.Adam.Params(), schedule=constant(0.1), ema_decay=0.9
            ),
        },
    }
    return MultiLearner.Params(**values).set(fields).instantiate()


def test_each_learner_updates_its_own_weights() -> None:
    gradients = [random_tensors(seed) for seed in range(1, 6)]
    both = run(make_multi(), gradients)[-1]
    adagrad = run(make_learner(optimizers.Adagrad.Params(), rate=0.2), gradients)[-1]
    adam = run(make_learner(optimizers.Adam.Params(), rate=0.1, ema_decay=0.9), gradients)[-1]
    for path in TRAINABLE:
        alone = adagrad if path.startswith("embedding/") else adam
        np.testing.assert_array_equal(both.weights[path], alone.weights[path])
    assert both.slots.keys() == make_multi().slots(SPECS).keys()
    assert "embedding/w/sum_of_squares" in both.slots
    assert "stack/w/ema" in both.slots and "embedding/w/ema" not in both.slots


def test_metrics_are_given_for_each_learner_and_for_all() -> None:
    gradients = random_tensors(1)
    metrics = run(make_multi(), [gradients])[0].metrics
    rest = [path for path in TRAINABLE if not path.startswith("embedding/")]
    expected = {
        "learning_rate": 0.2,
        "learning_rate/embedding": 0.2,
        "learning_rate/rest": 0.1,
        "gradient_norm": norm(gradients, TRAINABLE),
        "gradient_norm/embedding": norm(gradients, ["embedding/w"]),
        "gradient_norm/rest": norm(gradients, rest),
        "nonfinite_total": 0.0,
        "nonfinite_consecutive": 0.0,
    }
    assert_equal(metrics, expected, rtol=1e-6)


def test_each_learner_clips_by_the_norm_of_its_own_weights() -> None:
    gradients = random_tensors(1)
    sgd = optimizers.SGD.Params()
    learners = {
        "embedding": Learner.Params(optimizer=sgd, schedule=constant(1.0), clip_global_norm=0.5),
        "rest": Learner.Params(optimizer=sgd, schedule=constant(1.0)),
    }
    made = run(make_multi(learners=learners), [gradients])[0]
    weights = random_tensors(0)
    factor = 0.5 / norm(gradients, ["embedding/w"])
    expected = weights["embedding/w"] - gradients["embedding/w"] * factor
    np.testing.assert_allclose(made.weights["embedding/w"], expected, rtol=1e-5, atol=1e-6)
    expected = weights["stack/w"] - gradients["stack/w"]
    np.testing.assert_allclose(made.weights["stack/w"], expected, rtol=1e-6)


def test_bad_gradient_of_one_learner_stops_all() -> None:
    gradients = {**random_tensors(1), "scale": tf.constant(math.nan)}
    made = run(make_multi(), [gradients])[0]
    assert_equal(made.weights, random_tensors(0))


def test_statistics_are_kept_by_the_patterns_of_all_and_of_the_learner_of_their_path() -> None:
    multi = make_multi(
        frozen=["a/.*"],
        patterns={"embedding": "emb.*", "rest": "stack/.*|scale"},
        **{"learners.rest.frozen": [".*/mean"]},
    )
    paths = ("a/mean", "embedding/mean", "stack/mean", "stack/variance")
    values = dict.fromkeys(paths, tf.constant(1.0))
    assert list(multi.without_frozen(values)) == ["embedding/mean", "stack/variance"]


def test_weights_frozen_for_all_need_no_pattern() -> None:
    multi = make_multi(frozen=["scale"], patterns={"embedding": "emb.*", "rest": "stack/.*"})
    assert list(multi.trainable(SPECS)) == ["embedding/w", "stack/w", "stack/bias"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"embedding": "embedding/.*", "rest": "stack/.*"}, "no pattern matches 'scale'"),
        (
            {"embedding": "embedding/.*", "rest": ".*"},
            "'embedding/w' is matched by the patterns of embedding and rest",
        ),
        (
            {"embedding": "embeding/.*", "rest": ".*"},
            r"patterns.embedding: 'embeding/\.\*' matches no weight; the weights are 'embedding/w'",
        ),
    ],
)
def test_patterns_that_do_not_divide_the_weights_are_refused(
    patterns: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_multi(patterns=patterns).slots(SPECS)


def test_names_of_patterns_and_learners_have_to_agree() -> None:
    with pytest.raises(ValueError, match=r"patterns has \['other'\]"):
        make_multi(patterns={"other": ".*"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("accumulation_steps", 7),
        ("loss_scale", LossScale.Params()),
        ("max_consecutive_nonfinite_steps", 7),
        ("max_rollbacks", 7),
    ],
)
def test_what_only_all_learners_can_have_is_refused_on_one(field: str, value: Any) -> None:
    one = Learner.Params(optimizer=optimizers.SGD.Params(), schedule=constant(1.0)).set(
        {field: value}
    )
    with pytest.raises(ValueError, match=f"{field} is a setting for all learners together"):
        make_multi(patterns={"all": ".*"}, learners={"all": one})
    made = make_multi(**{field: value}).params.get(field)
    assert made == value


def test_learner_params_survive_the_round_trip_through_text() -> None:
    for params in (make_multi().params, make_learner(optimizers.Adafactor.Params()).params):
        again = type(params).from_text(params.to_text())
        assert again.diff(params) in ("", [])
        again.instantiate()


# --- weights of one kind ---

TWINS = {
    spec.path: spec
    for spec in (
        make_spec("a", (3, 4)),
        make_spec("b", (3, 4)),
        make_spec("free/w", (3, 4)),
        make_spec("free/v", (3, 4)),
        make_spec("stacked", (3, 4), stacked=1),
        make_spec("wide", (3, 4), dtype="float64"),
        make_spec("flat", (12,)),
    )
}
EXCLUDED: dict[str, Any] = {"weight_decay": 0.3, "weight_decay_exclude": ["free/.*"]}
TRUSTED: dict[str, Any] = {"weight_decay": 0.3, "trust_exclude": ["free/.*"]}


class Recorded(XlaFusion):
    """Notes whose spec each weight is updated with."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def __call__(self, function: Any, **static: Any) -> Any:
        self.used.append(static["spec"].path)
        return super().__call__(function, **static)


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.SGD.Params(**EXCLUDED),
        optimizers.Momentum.Params(**EXCLUDED),
        optimizers.Nesterov.Params(**EXCLUDED),
        optimizers.RMSProp.Params(**EXCLUDED),
        optimizers.Adagrad.Params(**EXCLUDED),
        optimizers.Adam.Params(**EXCLUDED),
        optimizers.AdamW.Params(**EXCLUDED),
        optimizers.Adafactor.Params(min_dim_to_factor=3, **EXCLUDED),
        optimizers.LARS.Params(**TRUSTED),
        optimizers.LARS.Params(**EXCLUDED),
        optimizers.LAMB.Params(**TRUSTED),
        optimizers.LAMB.Params(**EXCLUDED),
    ],
    ids=lambda params: params.owner.__name__,
)
def test_weights_of_one_kind_share_an_update_and_others_have_their_own(optimizer: Any) -> None:
    learner = make_learner(optimizer, ema_decay=0.5, clip_tensor_norm=2.0, clip_global_norm=3.0)
    step, fusion = tf.constant(3, tf.int64), Recorded()
    weights, gradients = random_tensors(0, TWINS), random_tensors(1, TWINS)
    slots = initial_slots(learner, TWINS)
    for _ in range(2):
        together = updated(learner, TWINS, weights, gradients, slots, step, fuse=fusion)
    assert fusion.used == ["a", "a", "free/w", "free/w", "stacked", "wide", "flat"] * 2
    assert len(fusion._compiled) == 5
    norms = {p: learner.squared_norm(spec, gradients[p]) for p, spec in TWINS.items()}
    factor = learner.global_factor(tf.add_n([tf.cast(n, tf.float32) for _, n in norms.values()]))
    assert factor is not None and factor < 1
    for path, spec in TWINS.items():
        own = {name: slots[made.path] for name, made in learner.slots_of(spec).items()}
        gradient = learner.clipped(spec, gradients[path], factor)
        weight, new = learner.update_weight(
            spec, weights[path], gradient, own, learner.schedule(step), tf.constant(0, tf.int64)
        )
        np.testing.assert_allclose(together.weights[path], weight, rtol=1e-5, err_msg=path)
        for name, slot in new.items():
            found = together.slots[f"{path}/{name}"]
            np.testing.assert_allclose(found, slot, rtol=1e-5, atol=1e-7, err_msg=path)


class Doubling:
    """Mixed into an optimizer: the update of one path is twice as large."""

    def decrement(self, spec: WeightSpec, *args: Any) -> Any:
        decrement, slots = super().decrement(spec, *args)  # type: ignore[misc]
        return decrement * (2.0 if spec.path == "b" else 1.0), slots


class Mixed(Doubling, optimizers.Momentum):
    """A mixin before one of Tekso's."""


class Below(Mixed):
    """Says nothing itself."""


class OwnKind(Mixed):
    """Says what its update reads."""

    def kind(self, spec: WeightSpec) -> Any:
        return spec.path == "b"


class Renamed(optimizers.Momentum):
    """Changes nothing."""


class OwnLearner(Learner):
    """Reads the path in a helper."""

    def _squares(self, spec: WeightSpec, gradient: tf.Tensor) -> tf.Tensor:
        return super()._squares(spec, gradient) * (4.0 if spec.path == "b" else 1.0)


@pytest.mark.parametrize(
    ("learner", "used"),
    [
        (make_learner(Mixed.Params()), "a b"),
        (make_learner(Below.Params()), "a b"),
        (make_learner(OwnKind.Params()), "a b"),
        (make_learner(Renamed.Params()), "a a"),
        (
            OwnLearner.Params(
                optimizer=optimizers.SGD.Params(), schedule=constant(0.1), clip_tensor_norm=0.5
            ).instantiate(),
            "a b",
        ),
    ],
    ids=["mixed", "below", "own_kind", "renamed", "own_learner"],
)
def test_an_update_of_a_users_own_is_shared_only_if_it_says_so(learner: Learner, used: str) -> None:
    specs = {path: TWINS[path] for path in ("a", "b")}
    weights, fusion = {path: tf.zeros([3, 4]) for path in specs}, Recorded()
    ones = {path: tf.ones([3, 4]) for path in specs}
    slots, step = initial_slots(learner, specs), tf.constant(0, tf.int64)
    new = updated(learner, specs, weights, ones, slots, step, fuse=fusion).weights
    assert fusion.used == used.split()
    ratio = {"a a": 1.0}.get(used, 0.5 if isinstance(learner, OwnLearner) else 2.0)
    np.testing.assert_allclose(new["b"], ratio * new["a"], rtol=1e-5)


def test_a_schedule_may_return_a_number() -> None:
    class Plain(schedules.Constant):
        def __call__(self, step: Any) -> Any:
            return 0.1

    learner = make_learner().params.copy().set(schedule=Plain.Params(value=1.0)).instantiate()
    (made,) = run(learner, [random_tensors(1)])
    assert float(made.metrics["learning_rate"]) == pytest.approx(0.1)
