"""Gradient combinations against NumPy written from the papers' algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.gradient_combination import GradDrop, PCGrad, SumOfGradients, orders

LOSSES = ("a", "b", "c")
SHAPES = {"w": (3, 5), "b": (5,), "scale": ()}


def gradients(seed: int) -> dict[str, Any]:
    """Returns gradients of three losses for three shared weights, and of one own weight."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {
        path: tuple(tf.constant(rng.normal(size=shape), tf.float32) for _ in LOSSES)
        for path, shape in SHAPES.items()
    }
    return {**found, "own": tf.constant([1.0, -2.0])}


def key_of(step: int) -> tf.Tensor:
    return counter_hash.root_key(5, step)


def pc_grad(vectors: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Algorithm 1 of the paper on whole vectors: [tasks, n] -> [n]."""
    projected = vectors.astype(np.float64).copy()
    for i, own in enumerate(projected):
        for j in order[i]:
            other = vectors[j].astype(np.float64)
            if j != i and own @ other < 0:
                own -= (own @ other) / (other @ other) * other
    return projected.sum(0)


@pytest.mark.parametrize("step", range(6))
def test_pc_grad_is_the_algorithm_of_the_paper_over_all_shared_weights(step: int) -> None:
    given = gradients(step)
    found, metrics = PCGrad.Params().instantiate().combined(given, LOSSES, key_of(step))
    vectors = np.stack(
        [np.concatenate([np.ravel(given[p][i]) for p in SHAPES]) for i in range(len(LOSSES))]
    )
    order = orders(key_of(step), len(LOSSES)).numpy()
    want = pc_grad(vectors, order)
    np.testing.assert_allclose(
        np.concatenate([np.ravel(found[p]) for p in SHAPES]), want, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(found["own"], given["own"])
    gram = vectors @ vectors.T
    share = np.mean([gram[i, j] < 0 for i in range(3) for j in range(i)])
    assert float(metrics["gradient_conflicts"]) == pytest.approx(share)


def test_some_case_of_the_pc_grad_test_has_conflicts_and_depends_on_the_order() -> None:
    changed = False
    for seed in range(6):
        given = gradients(seed)
        vectors = np.stack(
            [np.concatenate([np.ravel(given[p][i]) for p in SHAPES]) for i in range(3)]
        )
        one, other = (pc_grad(vectors, np.array([row] * 3)) for row in ((0, 1, 2), (2, 1, 0)))
        changed |= not np.allclose(one, other)
    assert changed


def test_orders_are_permutations_that_differ_by_step() -> None:
    found = [orders(key_of(step), 4).numpy() for step in range(20)]
    assert all((np.sort(order, 1) == np.arange(4)).all() for order in found)
    assert len({tuple(order.ravel()) for order in found}) > 15


@pytest.mark.parametrize("leak", [{}, {"b": 0.25}])
def test_grad_drop_keeps_one_sign_per_element_by_the_formula(leak: dict[str, float]) -> None:
    given = gradients(1)
    found, _ = GradDrop.Params(leak=leak).instantiate().combined(given, LOSSES, key_of(3))
    leaks = np.array([leak.get(name, 0.0) for name in LOSSES])
    for path, shape in SHAPES.items():
        stream = counter_hash.fold(key_of(3), counter_hash.stream(f"{path}:grad_drop"))
        u = counter_hash.uniform(stream, shape or [1]).numpy().reshape(shape)
        g = np.stack([np.asarray(x) for x in given[path]]).astype(np.float64)
        p = 0.5 * (1 + g.sum(0) / np.abs(g).sum(0))
        mask = (p > u) * (g > 0) + (p < u) * (g < 0)
        leaked = leaks.reshape(-1, *[1] * len(shape))
        want = ((leaked + (1 - leaked) * mask) * g).sum(0)
        np.testing.assert_allclose(found[path], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["own"], given["own"])


def test_grad_drop_adds_gradients_of_one_sign_and_is_unbiased_in_sign() -> None:
    alike = {"w": (tf.constant([1.0, -2.0]), tf.constant([3.0, -1.0]))}
    drop = GradDrop.Params().instantiate()
    np.testing.assert_allclose(drop.combined(alike, "ab", key_of(0))[0]["w"], [4.0, -3.0])
    against = {"w": (tf.fill([20_000], 3.0), tf.fill([20_000], -1.0))}
    kept = drop.combined(against, "ab", key_of(0))[0]["w"].numpy()
    assert set(np.unique(kept)) == {-1.0, 3.0}
    assert (kept > 0).mean() == pytest.approx(0.75, abs=0.02)  # p = (1 + 2/4) / 2


def test_a_leak_for_an_unknown_task_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"leak names 'd', but the tasks are a, b, c") as caught:
        GradDrop.Params(leak={"d": 0.5}).instantiate().check(LOSSES, "task.gradients")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"must be from 0 to 1"):
        GradDrop.Params(leak={"a": 1.5}).instantiate().check(LOSSES, "task.gradients")
    assert SumOfGradients.Params().instantiate().is_sum
