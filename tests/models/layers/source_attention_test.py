"""Attention to a source against NumPy: scores, masks, several queries a source, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.source_attention import AdditiveAttention, DotAttention, SourceAttention

B, K, S, Q, M = 2, 3, 5, 4, 6
RNG = np.random.default_rng(0)
QUERIES, ENCODED = RNG.normal(size=(B, K, Q)), RNG.normal(size=(B, S, M))
MASK = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]) > 0
KINDS: dict[str, SourceAttention.Params] = {
    "additive": AdditiveAttention.Params(),
    "additive with units": AdditiveAttention.Params(hidden_dim=7),
    "general": DotAttention.Params(),
    "scaled general": DotAttention.Params(scale="rsqrt_dim"),
    "scaled dot": DotAttention.Params(form="dot", scale="rsqrt_dim"),
}


def build(kind: str) -> tuple[SourceAttention, Theta, dict[str, np.ndarray], np.ndarray]:
    encoded = ENCODED[..., :Q] if "dot" in kind else ENCODED
    params = KINDS[kind].copy().set(query_dim=Q, memory_dim=encoded.shape[-1])
    layer: SourceAttention = params.instantiate()
    rng = np.random.default_rng(1)
    weights = {path: rng.normal(size=s.shape) for path, s in layer.specs().items()}
    return layer, layer.theta({p: tf.constant(w) for p, w in weights.items()}), weights, encoded


def score(kind: str, w: dict[str, np.ndarray], query: np.ndarray, item: np.ndarray) -> float:
    if kind.startswith("additive"):
        return float(w["w_score"] @ np.tanh(query @ w["w_query"] + item @ w["w_key"]))
    product = query @ (item if "dot" in kind else item @ w["w_key"])
    return float(product / np.sqrt(Q) if kind.startswith("scaled") else product)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("kind", KINDS)
def test_contexts_are_means_of_the_source_by_softmax_of_scores(kind: str, mask: Any) -> None:
    layer, theta, weights, encoded = build(kind)
    ctx = StepContext()
    memory = layer.memory(theta, tf.constant(encoded), ctx)
    given = None if mask is None else tf.constant(mask)
    contexts, probabilities = layer.attend(
        theta, tf.constant(QUERIES), ctx, memory=memory, mask=given
    )
    for b in range(B):
        seen = np.arange(S) if mask is None else np.flatnonzero(mask[b])
        for k in range(K):
            e = np.exp([score(kind, weights, QUERIES[b, k], encoded[b, s]) for s in seen])
            expected = np.zeros(S)
            expected[seen] = e / e.sum()
            np.testing.assert_allclose(probabilities[b, k], expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(contexts[b, k], expected @ encoded[b], rtol=1e-9)


@pytest.mark.parametrize("kind", ["additive", "general"])
def test_a_query_that_sees_nothing_gives_0_and_no_gradient(kind: str) -> None:
    layer, theta, _, encoded = build(kind)
    ctx, x = StepContext(), tf.constant(QUERIES)
    mask = tf.constant([[False] * S, [True] * S])
    with tf.GradientTape() as tape:
        tape.watch(x)
        memory = layer.memory(theta, tf.constant(encoded), ctx)
        contexts, probabilities = layer.attend(theta, x, ctx, memory=memory, mask=mask)
        total = tf.reduce_sum(tf.sin(contexts))
    np.testing.assert_array_equal(contexts[0], 0)
    np.testing.assert_array_equal(probabilities[0], 0)
    gradient = tape.gradient(total, x).numpy()
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.abs(gradient[1]).max() > 1e-3


def test_what_is_hidden_may_be_anything_finite() -> None:
    layer, theta, _, encoded = build("additive")
    ctx = StepContext()
    found = []
    for filling in (0.0, 1e3):
        other = np.where(MASK[..., None], encoded, filling)
        memory = layer.memory(theta, tf.constant(other), ctx)
        found.append(
            layer.attend(theta, tf.constant(QUERIES), ctx, memory=memory, mask=tf.constant(MASK))[0]
        )
    np.testing.assert_array_equal(*found)


def test_weights_dims_and_fans() -> None:
    additive = AdditiveAttention.Params(query_dim=Q, memory_dim=M, hidden_dim=7).instantiate()
    specs = {p: (s.shape, s.dims, tuple(s.fans)) for p, s in additive.specs().items()}
    assert specs == {
        "w_query": ((Q, 7), ("embed", None), (Q, 7)),
        "w_key": ((M, 7), ("embed", None), (M, 7)),
        "w_score": ((7,), (None,), (7, 1)),
    }
    assert not DotAttention.Params(query_dim=Q, memory_dim=Q, form="dot").instantiate().specs()


def test_a_dot_product_of_different_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"query_dim is 4 and memory_dim 6.*general"):
        DotAttention.Params(query_dim=Q, memory_dim=M, form="dot").instantiate()
