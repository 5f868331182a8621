"""ResidualAdapter: begins as the identity, and adapts every use of a Transformer layer."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.residual_adapter import AdaptedTransformerLayer, ResidualAdapter
from tekso.models.layers.transformer import TransformerLayer

D, H = 4, 3
CTX = StepContext()


def test_it_adds_the_bottleneck_of_the_normalised_input() -> None:
    layer = ResidualAdapter.Params(dim=D, hidden_dim=H, norm=RMSNorm.Params()).instantiate()
    theta = layer.init(0)
    x = np.random.default_rng(0).normal(size=(2, 5, D)).astype(np.float32)
    np.testing.assert_array_equal(layer.fprop(theta, tf.constant(x), CTX), x)  # it begins so

    rng = np.random.default_rng(1)
    flat = {p: rng.normal(size=s.shape).astype(np.float32) for p, s in layer.specs().items()}
    theta = layer.theta({p: tf.constant(w) for p, w in flat.items()})
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * flat["norm/scale"]
    h = np.maximum(y @ flat["bottleneck/hidden/w"] + flat["bottleneck/hidden/b"], 0)
    want = x + h @ flat["bottleneck/output/w"] + flat["bottleneck/output/b"]
    np.testing.assert_allclose(layer.fprop(theta, tf.constant(x), CTX), want, rtol=1e-4, atol=1e-5)


def test_an_adapted_layer_is_the_layer_and_then_the_adapter_also_in_decoding() -> None:
    parts = {
        "dim": D,
        "attention": MultiHeadAttention.Params(num_heads=2, mask="causal"),
        "feed_forward": FeedForward.Params(hidden_dim=6),
    }
    plain = TransformerLayer.Params(**parts).instantiate()
    adapted = AdaptedTransformerLayer.Params(
        **parts, residual_adapter=ResidualAdapter.Params(hidden_dim=H)
    ).instantiate()
    rng = np.random.default_rng(2)
    flat = {
        p: tf.constant(rng.normal(size=s.shape), tf.float32) for p, s in adapted.specs().items()
    }
    theta = adapted.theta(flat)
    inner = plain.theta({p: flat[p] for p in plain.specs()})
    x = tf.constant(rng.normal(size=(2, 3, D)), tf.float32)
    want = adapted.residual_adapter.fprop(theta.residual_adapter, plain.fprop(inner, x, CTX), CTX)
    found = adapted.fprop(theta, x, CTX)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert float(tf.reduce_max(tf.abs(found - plain.fprop(inner, x, CTX)))) > 0.1
    cache, outputs = adapted.init_cache(2, 3), []
    for i in range(3):
        y, cache = adapted.extend_step(theta, x[:, i : i + 1], cache, i, CTX)
        outputs.append(y)
    np.testing.assert_allclose(tf.concat(outputs, 1), want, rtol=1e-4, atol=1e-5)
