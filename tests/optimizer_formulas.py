"""Formulas of the optimizers in NumPy, and runs of the optimizers to compare with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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


ALL = {
    **{name: params for name, (params, _) in CASES.items()},
    "nesterov": optimizers.Nesterov.Params(),
}
