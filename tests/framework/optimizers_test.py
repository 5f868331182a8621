"""Every optimizer over several steps against its formula, written again in float64 NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import initializers, optimizers
from tekso.framework.weight_spec import WeightSpec

NUM_STEPS = 6
RATES = [0.1, 0.2, 0.05, 0.0, 0.3, 0.1]
ZEROS = initializers.Zeros.Params().instantiate()
Array = np.ndarray[Any, Any]
Reference = Callable[[Array, list[Array]], Iterator[Array]]


def make_spec(
    shape: tuple[int, ...], *, dtype: str = "float64", stacked: int = 0, path: str = "ffn/w"
) -> WeightSpec:
    dims = ("layers",) * stacked + tuple(f"dim{d}" for d in range(len(shape) - stacked))
    return WeightSpec(path, shape, dims, ZEROS, dtype=dtype, stacked=stacked, template=path)


def initial_slots(optimizer: optimizers.Optimizer, spec: WeightSpec) -> dict[str, tf.Tensor]:
    return {k: tf.constant(s.initial_value(0)) for k, s in optimizer.slots(spec).items()}


def run(
    params: optimizers.Optimizer.Params,
    spec: WeightSpec,
    weight: Array,
    gradients: list[Array],
    rates: list[float] = RATES,
) -> list[Array]:
    """Returns the weight after every step."""
    optimizer = params.instantiate()
    slots = initial_slots(optimizer, spec)
    w = tf.cast(weight, spec.dtype)
    history = []
    for step, gradient in enumerate(gradients):
        w, slots = optimizer.update(
            spec,
            w,
            tf.cast(gradient, spec.dtype),
            slots,
            tf.constant(rates[step], tf.float64),
            tf.constant(step, tf.int64),
        )
        history.append(w.numpy())
    return history


def data(shape: tuple[int, ...], seed: int = 0) -> tuple[Array, list[Array]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), list(rng.normal(size=(NUM_STEPS, *shape)))


def rms(x: Array) -> float:
    return math.sqrt(np.mean(np.square(x)))


# The references: each yields the weight after every step.


def sgd(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, g in zip(RATES, gradients, strict=True):
        w = w - rate * g
        yield w


def sgd_decayed(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, g in zip(RATES, gradients, strict=True):
        w = w - rate * g - 0.03 * w
        yield w


def momentum(w: Array, gradients: list[Array]) -> Iterator[Array]:
    v = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        v = 0.7 * v + g
        w = w - rate * v
        yield w


def momentum_l2(w: Array, gradients: list[Array]) -> Iterator[Array]:
    """The gradient of loss + 0.03 / 2 * |w|^2."""
    v = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        v = 0.7 * v + g + 0.03 * w
        w = w - rate * v
        yield w


def nesterov(w: Array, gradients: list[Array], rate: float) -> Iterator[Array]:
    """Sutskever's own variables, theta and v; the gradients are taken at theta + momentum * v."""
    theta, v = w, np.zeros_like(w)
    for g in gradients:
        v = 0.7 * v - rate * g
        theta = theta + v
        yield theta + 0.7 * v


def rmsprop(w: Array, gradients: list[Array]) -> Iterator[Array]:
    s = np.full_like(w, 0.5)
    for rate, g in zip(RATES, gradients, strict=True):
        s = 0.8 * s + 0.2 * g * g
        w = w - rate * g / np.sqrt(s + 0.01)
        yield w


def rmsprop_momentum(w: Array, gradients: list[Array]) -> Iterator[Array]:
    s, v = np.zeros_like(w), np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        s = 0.9 * s + 0.1 * g * g
        v = 0.6 * v + rate * g / np.sqrt(s + 1.0)
        w = w - v
        yield w


def adagrad(w: Array, gradients: list[Array]) -> Iterator[Array]:
    total = np.full_like(w, 0.25)
    for rate, g in zip(RATES, gradients, strict=True):
        total = total + g**2
        w = w - rate * g / (1e-3 + np.sqrt(total))
        yield w


def adam_directions(
    gradients: list[Array], beta1: float, beta2: float, epsilon: float
) -> Iterator[Array]:
    m = v = np.zeros_like(gradients[0])
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        yield m_hat / (np.sqrt(v_hat) + epsilon)


def adam(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, r in zip(RATES, adam_directions(gradients, 0.8, 0.95, 1e-3), strict=True):
        w = w - rate * r
        yield w


def adam_without_beta1(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, r in zip(RATES, adam_directions(gradients, 0.0, 0.999, 1e-8), strict=True):
        w = w - rate * r
        yield w


def adamw(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, r in zip(RATES, adam_directions(gradients, 0.9, 0.999, 1e-8), strict=True):
        w = w - rate * (r + 0.01 * w)
        yield w


def adamw_independent(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, r in zip(RATES, adam_directions(gradients, 0.9, 0.999, 1e-8), strict=True):
        w = w - rate * r - 0.2 * w
        yield w


def lamb(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, r in zip(RATES, adam_directions(gradients, 0.9, 0.999, 1e-6), strict=True):
        update = r + 0.1 * w
        w = w - rate * np.linalg.norm(w) / np.linalg.norm(update) * update
        yield w


def lamb_bounded(w: Array, gradients: list[Array]) -> Iterator[Array]:
    for rate, r in zip(RATES, adam_directions(gradients, 0.9, 0.999, 1e-6), strict=True):
        update = r + 0.01 * w
        w = w - rate * min(np.linalg.norm(w), 0.5) / np.linalg.norm(update) * update
        yield w


def lars(w: Array, gradients: list[Array]) -> Iterator[Array]:
    v = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        norm = np.linalg.norm(w)
        trust = 0.02 * norm / (np.linalg.norm(g) + 0.1 * norm)
        v = 0.9 * v + rate * trust * (g + 0.1 * w)
        w = w - v
        yield w


def lars_scaled(w: Array, gradients: list[Array]) -> Iterator[Array]:
    v = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        norm = np.linalg.norm(w)
        trust = 0.001 * norm / (np.linalg.norm(g) + 1e-4 * norm)
        v = 0.9 * v + g + 1e-4 * w
        w = w - rate * trust * v
        yield w


def adafactor(w: Array, gradients: list[Array]) -> Iterator[Array]:
    """Algorithm 4 with algorithm 5's hyperparameters; R and C are the sums of the paper."""
    rows, columns = w.shape
    R, C = np.zeros((rows, 1)), np.zeros((1, columns))
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        beta = 1 - t**-0.8
        square = g**2 + 1e-30
        R = beta * R + (1 - beta) * square @ np.ones((columns, 1))
        C = beta * C + (1 - beta) * np.ones((1, rows)) @ square
        u = g / np.sqrt(R @ C / R.sum())
        u = u / max(1.0, rms(u) / 1.0)
        w = w - rate * min(1e-2, t**-0.5) * max(1e-3, rms(w)) * u
        yield w


def adafactor_whole(w: Array, gradients: list[Array]) -> Iterator[Array]:
    """The same for a vector, with tight clipping, the step from outside, and a first moment."""
    v, m = np.zeros_like(w), np.zeros_like(w)
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        beta = 0.9 * (1 - 0.9 ** (t - 1)) / (1 - 0.9**t)
        v = beta * v + (1 - beta) * (g**2 + 1e-30)
        u = g / np.sqrt(v)
        m = 0.8 * m + 0.2 * rate * u / max(1.0, rms(u) / 0.5)
        w = w - m
        yield w


def adafactor_decayed(w: Array, gradients: list[Array]) -> Iterator[Array]:
    v = np.zeros_like(w)
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        beta = 1 - t**-0.5
        v = beta * v + (1 - beta) * (g**2 + 1e-30)
        step = rate * min(t**-0.5, 0.02)
        w = w - step * max(1e-3, rms(w)) * g / np.sqrt(v) - 0.5 * step * w
        yield w


CASES: dict[str, tuple[optimizers.Optimizer.Params, Reference]] = {
    "sgd": (optimizers.SGD.Params(), sgd),
    "sgd_decayed": (
        optimizers.SGD.Params(weight_decay=0.03, weight_decay_scaling="independent"),
        sgd_decayed,
    ),
    "momentum": (optimizers.Momentum.Params(momentum=0.7), momentum),
    "momentum_l2": (
        optimizers.Momentum.Params(
            momentum=0.7, weight_decay=0.03, weight_decay_scaling="gradient"
        ),
        momentum_l2,
    ),
    "rmsprop": (
        optimizers.RMSProp.Params(decay=0.8, epsilon=0.01, initial_mean_square=0.5),
        rmsprop,
    ),
    "rmsprop_momentum": (
        optimizers.RMSProp.Params(decay=0.9, momentum=0.6, epsilon=1.0),
        rmsprop_momentum,
    ),
    "adagrad": (
        optimizers.Adagrad.Params(initial_sum_of_squares=0.25, epsilon=1e-3),
        adagrad,
    ),
    "adam": (optimizers.Adam.Params(beta1=0.8, beta2=0.95, epsilon=1e-3), adam),
    "adam_without_beta1": (optimizers.Adam.Params(beta1=0.0), adam_without_beta1),
    "adamw": (optimizers.AdamW.Params(), adamw),
    "adamw_independent": (
        optimizers.AdamW.Params(weight_decay=0.2, weight_decay_scaling="independent"),
        adamw_independent,
    ),
    "lamb": (optimizers.LAMB.Params(weight_decay=0.1), lamb),
    "lamb_bounded": (optimizers.LAMB.Params(max_weight_norm=0.5), lamb_bounded),
    "lars": (optimizers.LARS.Params(trust_coefficient=0.02, weight_decay=0.1), lars),
    "lars_scaled": (optimizers.LARS.Params(momentum_form="scaled"), lars_scaled),
    "adafactor": (optimizers.Adafactor.Params(min_dim_to_factor=3), adafactor),
    "adafactor_whole": (
        optimizers.Adafactor.Params(
            step_size="learning_rate",
            weight_scale="none",
            decay="adam",
            beta2=0.9,
            clipping_threshold=0.5,
            beta1=0.8,
        ),
        adafactor_whole,
    ),
    "adafactor_decayed": (
        optimizers.Adafactor.Params(
            clipping_threshold=None,
            max_relative_step=0.02,
            decay_exponent=0.5,
            weight_decay=0.5,
        ),
        adafactor_decayed,
    ),
}


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


ALL = {
    **{name: params for name, (params, _) in CASES.items()},
    "nesterov": optimizers.Nesterov.Params(),
}


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


@pytest.mark.parametrize(
    ("shape", "stacked", "numbers", "names"),
    [
        ((1024, 4096), 0, 5120, ["row_second_moment", "column_second_moment"]),
        ((4096, 1024), 0, 5120, ["row_second_moment", "column_second_moment"]),
        ((100, 4096), 0, 409_600, ["second_moment"]),
        ((128, 128), 0, 256, ["row_second_moment", "column_second_moment"]),
        ((127, 4096), 0, 127 * 4096, ["second_moment"]),
        ((4096,), 0, 4096, ["second_moment"]),
        ((1024, 4, 256), 0, 4 * (1024 + 256), ["row_second_moment", "column_second_moment"]),
        ((200, 4096), 1, 200 * 4096, ["second_moment"]),  # a stack of vectors
        ((6, 1024, 4096), 1, 6 * 5120, ["row_second_moment", "column_second_moment"]),
    ],
)
def test_adafactor_keeps_rows_and_columns_of_large_matrices(
    shape: tuple[int, ...], stacked: int, numbers: int, names: list[str]
) -> None:
    slots = optimizers.Adafactor.Params().instantiate().slots(make_spec(shape, stacked=stacked))
    assert sorted(slots) == sorted(names)  # so no first moment
    assert sum(spec.size for spec in slots.values()) == numbers


def test_adafactor_slots_keep_the_dims_of_what_is_left() -> None:
    spec = make_spec((6, 300, 4, 200), stacked=1)
    slots = optimizers.Adafactor.Params(beta1=0.9).instantiate().slots(spec)
    assert slots["row_second_moment"].dims == ("layers", "dim0", "dim1")
    assert slots["row_second_moment"].shape == (6, 300, 4)
    assert slots["column_second_moment"].dims == ("layers", "dim1", "dim2")
    assert slots["column_second_moment"].shape == (6, 4, 200)
    assert slots["first_moment"].shape == spec.shape
    assert {slot.stacked for slot in slots.values()} == {1}


def test_adafactor_factors_the_two_largest_dims_of_three() -> None:
    spec = make_spec((4, 2, 5))
    params = optimizers.Adafactor.Params(min_dim_to_factor=3, clipping_threshold=None)
    weight, gradients = data((4, 2, 5))
    given = run(params, spec, weight, gradients[:1])[0]
    for j in range(2):  # each slice along the small dim has rows and columns of its own
        square = gradients[0][:, j] ** 2
        v = np.outer(square.sum(axis=1), square.sum(axis=0)) / square.sum()
        step = RATES[0] * 0.01 * rms(weight)
        expected = weight[:, j] - step * gradients[0][:, j] / np.sqrt(v)
        np.testing.assert_allclose(given[:, j], expected, rtol=1e-11)


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
