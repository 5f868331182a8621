"""The Transformer layer: composed by hand from its children; decoding against the full pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward, GatedFeedForward
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.transformer import TransformerLayer

B, T, S, D = 2, 5, 3, 6


def random(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(np.random.default_rng([seed, *shape]).standard_normal(shape), tf.float32)


def params(**fields: Any) -> TransformerLayer.Params:
    p = TransformerLayer.Params(dim=D, **fields)
    p.set({"attention.num_heads": 3, "attention.mask": "causal", "feed_forward.hidden_dim": 7})
    if p.memory_attention is not None:
        p.memory_attention.num_heads = 2
    return p


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("with_memory", [False, True])
def test_parts_are_added_to_their_input(norm_position: str, with_memory: bool) -> None:
    memory_attention = MultiHeadAttention.Params() if with_memory else None
    p = params(norm_position=norm_position, memory_attention=memory_attention)
    layer = p.instantiate()
    theta, ctx, x = layer.init(seed=1), StepContext(), random(B, T, D)
    memory = random(B, S, D) if with_memory else None

    got = layer.fprop(theta, x, ctx, memory=memory)

    def attend(x: tf.Tensor) -> tf.Tensor:
        return layer.attention.fprop(theta.attention, x, ctx)

    def attend_to_memory(x: tf.Tensor) -> tf.Tensor:
        return layer.memory_attention.fprop(theta.memory_attention, x, ctx, memory=memory)

    def feed(x: tf.Tensor) -> tf.Tensor:
        return layer.feed_forward.fprop(theta.feed_forward, x, ctx)

    parts = {"attention": attend, "memory_attention": attend_to_memory, "feed_forward": feed}
    for name, part in parts.items():
        if name != "memory_attention" or with_memory:
            norm, weights = getattr(layer, f"{name}_norm"), theta[f"{name}_norm"]
            if norm_position == "pre":
                x = x + part(norm.fprop(weights, x, ctx))
            else:
                x = norm.fprop(weights, x + part(x), ctx)
    np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)


def test_post_norm_output_is_normalised() -> None:
    layer = params(norm_position="post").instantiate()

    y = layer.fprop(layer.init(), random(B, T, D), StepContext())

    np.testing.assert_allclose(tf.reduce_mean(y, -1), np.zeros([B, T]), atol=1e-5)
    np.testing.assert_allclose(tf.math.reduce_std(y, -1), np.ones([B, T]), atol=1e-4)


def test_positions_mask_and_bias_reach_the_attention() -> None:
    layer = params().instantiate()
    theta, x = layer.init(seed=1), random(B, T, D)

    full = layer.fprop(theta, x, StepContext())
    mask = tf.constant(np.eye(T, dtype=bool)[None, None])
    alone = layer.fprop(theta, x, StepContext(), mask=mask)
    biased = layer.fprop(
        theta, x, StepContext(), bias=tf.constant(np.where(np.eye(T), 0.0, -1e9), tf.float32)
    )

    assert np.abs(full - alone).max() > 1e-3
    np.testing.assert_allclose(alone, biased, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_memory", [False, True])
def test_cache_gives_what_the_full_pass_gives(with_memory: bool) -> None:
    layer = params(
        memory_attention=MultiHeadAttention.Params() if with_memory else None
    ).instantiate()
    theta, ctx, x = layer.init(seed=1), StepContext(), random(B, T, D)
    memory = random(B, S, D) if with_memory else None
    want = layer.fprop(theta, x, ctx, memory=memory)

    cache = layer.init_cache(B, T)
    if with_memory:
        cache = layer.cache_memory(theta, cache, memory, ctx)
    first, cache = layer.extend_step(theta, x[:, :3], cache, 0, ctx)
    second, cache = layer.extend_step(theta, x[:, 3:4], cache, 3, ctx)
    third, cache = layer.extend_step(theta, x[:, 4:], cache, 4, ctx)

    np.testing.assert_allclose(tf.concat([first, second, third], 1), want, rtol=1e-4, atol=1e-5)


def test_children_can_be_swapped_and_take_over_the_dim() -> None:
    layer = params(norm=RMSNorm.Params(), feed_forward=GatedFeedForward.Params()).instantiate()

    specs = layer.specs()

    assert specs["attention_norm/scale"].shape == (D,)
    assert "attention_norm/bias" not in specs
    assert specs["feed_forward/gate/w"].shape == (D, 7)
    with pytest.raises(ValueError, match=r"FeedForward.Params.input_dim is 5, .* it has 6"):
        params(feed_forward=FeedForward.Params(input_dim=5)).instantiate()


def test_weight_count_is_that_of_the_formula() -> None:
    for dim, hidden in ((6, 7), (12, 48)):
        p = params().set({"dim": dim, "feed_forward.hidden_dim": hidden})
        count = sum(spec.size for spec in p.instantiate().specs().values())
        assert count == 4 * dim**2 + 4 * dim + 2 * dim * hidden + hidden + dim + 4 * dim


def test_dropout_differs_between_the_parts_and_from_evaluation() -> None:
    layer = params(dropout_rate=0.5).instantiate()
    theta, x = layer.init(seed=1), random(B, T, D)

    plain = layer.fprop(theta, x, StepContext())
    once, again = (layer.fprop(theta, x, StepContext(mode="train")) for _ in range(2))

    np.testing.assert_array_equal(once, again)
    assert np.abs(once - plain).max() > 1e-2
    assert layer.attention_dropout.pattern != layer.feed_forward_dropout.pattern


def test_memory_without_memory_attention_is_refused_and_the_other_way_round() -> None:
    layer = params().instantiate()
    theta, x = layer.init(), random(B, T, D)
    with pytest.raises(ValueError, match="a memory was given, but memory_attention is not set"):
        layer.fprop(theta, x, StepContext(), memory=random(B, S, D))
    layer = params(memory_attention=MultiHeadAttention.Params()).instantiate()
    theta = layer.init()
    with pytest.raises(ValueError, match="memory_attention is set, but no memory was given"):
        layer.fprop(theta, x, StepContext())
    with pytest.raises(ValueError, match="cache_memory before the first step"):
        layer.extend_step(theta, x, layer.init_cache(B, T), 0, StepContext())
