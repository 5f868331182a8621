"""Multi-head attention against a NumPy loop over heads and queries; cache against full pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext, collecting_attention
from tekso.framework.primitives.attention import mean_probabilities
from tekso.models.layers import attention as attention_module
from tekso.models.layers import masking
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import (
    AttentionPositions,
    RelativeBias,
    RelativeKeys,
    RotaryPositions,
)

B, T, S, D, N, H = 2, 5, 3, 6, 4, 2
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums of some tens of terms of size 1


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def build(**fields: Any) -> tuple[MultiHeadAttention, Any]:
    """An attention and a theta in which no weight is zero."""
    params = MultiHeadAttention.Params(input_dim=D, num_heads=N, head_dim=H, **fields)
    layer = params.instantiate()
    theta = theta_lib.map_leaves(lambda w: w + random(*w.shape, seed=1) / 4, layer.init(seed=3))
    return layer, theta


def naive(
    theta: Any,
    x: np.ndarray,
    memory: np.ndarray | None = None,
    *,
    mask: Any = True,
    bias: Any = 0.0,
    scale: float = H**-0.5,
) -> np.ndarray:
    """The formula of the paper, a head at a time."""
    w = {name: np.asarray(value) for name, value in theta.items() if name != "positions"}
    b = {name: w.get(f"{name}_bias", 0.0) for name in ("q", "k", "v", "out")}
    memory = x if memory is None else memory
    q = np.einsum("btd,dnh->btnh", x, w["q"]) + b["q"]
    k = np.einsum("bsd,dkh->bskh", memory, w["k"]) + b["k"]
    v = np.einsum("bsd,dkh->bskh", memory, w["v"]) + b["v"]
    group = q.shape[2] // k.shape[2]
    shape = [q.shape[0], q.shape[2], q.shape[1], k.shape[1]]
    mask, bias = np.broadcast_to(mask, shape), np.broadcast_to(bias, shape)
    y = np.zeros_like(q)
    for n in range(q.shape[2]):
        scores = scale * np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n // group]) + bias[:, n]
        e = np.exp(scores) * mask[:, n]
        total = e.sum(-1, keepdims=True)
        y[:, :, n] = e / np.where(total > 0, total, 1) @ v[:, :, n // group]
    return np.einsum("btnh,nhd->btd", y, w["out"]) + b["out"]


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("use_bias", [True, False])
def test_self_attention_is_the_formula(num_kv_heads: int | None, use_bias: bool) -> None:
    layer, theta = build(num_kv_heads=num_kv_heads, use_bias=use_bias)
    x = random(B, T, D)

    np.testing.assert_allclose(
        layer.fprop(theta, tf.constant(x), StepContext()), naive(theta, x), **TOLERANCE
    )


def test_causal_window_mask_bias_and_scale() -> None:
    layer, theta = build(mask="causal", window=3, query_scale=0.9)
    x, bias = random(B, T, D), random(1, N, T, T)
    ids = np.array([[1, 1, 1, 2, 2], [1, 2, 2, 2, 0]])
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= 0) & (distance < 3)
    same = (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)

    got = layer.fprop(
        theta,
        tf.constant(x),
        StepContext(),
        mask=masking.segments(tf.constant(ids)),
        bias=tf.constant(bias),
    )

    want = naive(theta, x, mask=(seen & same)[:, None], bias=bias, scale=0.9)
    np.testing.assert_allclose(got, want, **TOLERANCE)


def test_cross_attention_is_the_formula_over_a_memory() -> None:
    layer, theta = build(memory_dim=7, num_kv_heads=2)
    x, memory = random(B, T, D), random(B, S, 7)
    mask = masking.padding(tf.constant([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))

    got = layer.fprop(theta, tf.constant(x), StepContext(), memory=tf.constant(memory), mask=mask)
    ready = layer.keys_and_values(theta, tf.constant(memory), StepContext())
    again = layer.attend_to(theta, tf.constant(x), ready, StepContext(), mask=mask)

    want = naive(theta, x, memory, mask=mask)
    np.testing.assert_allclose(got, want, **TOLERANCE)
    np.testing.assert_allclose(again, want, **TOLERANCE)


def test_gradient_of_every_weight_is_that_of_the_formula() -> None:
    layer, theta = build(mask="causal", num_kv_heads=2)
    wide = theta_lib.map_leaves(lambda w: tf.cast(w, tf.float64), theta)
    x, dy = np.float64(random(B, T, D)), np.float64(random(B, T, D, seed=5))
    mask = np.tril(np.ones([T, T], bool))

    with tf.GradientTape() as tape:
        tape.watch(list(wide.values()))
        loss = tf.reduce_sum(layer.fprop(wide, tf.constant(x), StepContext()) * dy)
    got = tape.gradient(loss, dict(wide))

    values = {name: w.numpy() for name, w in wide.items()}
    for name, value in values.items():
        direction = np.float64(random(*value.shape, seed=6))
        up, down = (
            (naive({**values, name: value + e * direction}, x, mask=mask) * dy).sum()
            for e in (1e-5, -1e-5)
        )
        slope = float(tf.reduce_sum(got[name] * direction))
        assert slope == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-7), name


POSITIONS = [
    None,
    RotaryPositions.Params(),
    RelativeBias.Params(num_buckets=4, max_distance=3),
    RelativeKeys.Params(max_distance=2),
]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_cache_gives_what_the_full_pass_gives(
    positions: AttentionPositions.Params | None, num_kv_heads: int | None
) -> None:
    layer, theta = build(mask="causal", window=4, positions=positions, num_kv_heads=num_kv_heads)
    x = tf.constant(random(B, T, D))
    want = layer.fprop(theta, x, StepContext())

    cache = layer.init_cache(B, T + 2)
    parts, start = [], 0
    for length in (2, 1, 2):  # a block, a single element, another block
        part, cache = layer.extend_step(
            theta, x[:, start : start + length], cache, tf.constant(start), StepContext()
        )
        parts.append(part)
        start += length

    np.testing.assert_allclose(tf.concat(parts, 1), want, **TOLERANCE)


def test_rows_of_a_cache_may_be_at_different_positions() -> None:
    layer, theta = build(mask="causal", positions=RotaryPositions.Params())
    x = tf.constant(random(B, T, D))
    want = layer.fprop(theta, x, StepContext())
    cache = layer.init_cache(B, T)
    _, cache = layer.extend_step(theta, x[:, :4], cache, 0, StepContext())

    starts = [4, 2]  # the second row reads elements 2 once more
    new = tf.stack([x[0, 4:5], x[1, 2:3]])
    got, _ = layer.extend_step(theta, new, cache, tf.constant(starts), StepContext())

    np.testing.assert_allclose(got[:, 0], [want[0, 4], want[1, 2]], **TOLERANCE)


@pytest.mark.parametrize("positions", POSITIONS[1:])
def test_packed_texts_are_attended_to_as_if_alone(positions: AttentionPositions.Params) -> None:
    layer, theta = build(mask="causal", positions=positions)
    first, second = random(1, 3, D), random(1, 2, D, seed=8)
    alone = [layer.fprop(theta, tf.constant(x), StepContext()) for x in (first, second)]
    ids = tf.constant([[1, 1, 1, 2, 2]])

    packed = layer.fprop(
        theta,
        tf.concat([first, second], 1),
        StepContext(),
        mask=masking.segments(ids),
        positions=tf.constant([[0, 1, 2, 0, 1]]),
    )

    np.testing.assert_allclose(packed, tf.concat(alone, 1), **TOLERANCE)


def test_dropout_is_drawn_in_training_alone_and_from_its_own_stream() -> None:
    layer, theta = build(dropout_rate=0.5)
    x = random(B, T, D)

    def run(**kwargs: Any) -> np.ndarray:
        return layer.fprop(theta, tf.constant(x), StepContext(**kwargs)).numpy()

    np.testing.assert_allclose(run(), naive(theta, x), **TOLERANCE)
    once, again, other = (run(mode="train", step=step) for step in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert np.abs(once - other).max() > 1e-2
    part = layer.fprop(
        theta, tf.constant(x[1:]), StepContext(mode="train", step=1, example_offset=1)
    )
    np.testing.assert_allclose(part, once[1:], **TOLERANCE)


@pytest.mark.parametrize("input_dim", [6, 10])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, None), (4, 2)])
@pytest.mark.parametrize("use_bias", [True, False])
def test_weights_shapes_dims_and_fans(
    input_dim: int, num_heads: int, num_kv_heads: int | None, use_bias: bool
) -> None:
    params = MultiHeadAttention.Params(
        input_dim=input_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=3,
        use_bias=use_bias,
    )

    specs = params.instantiate().specs()

    kv, kv_name = (4, "heads") if num_kv_heads is None else (2, "kv_heads")
    want = {
        "q": ((input_dim, 4, 3), ("embed", "heads", "head_dim")),
        "k": ((input_dim, kv, 3), ("embed", kv_name, "head_dim")),
        "v": ((input_dim, kv, 3), ("embed", kv_name, "head_dim")),
        "out": ((4, 3, input_dim), ("heads", "head_dim", "embed")),
    }
    if use_bias:
        want |= {f"{name}_bias": (want[name][0][1:], want[name][1][1:]) for name in "qkv"}
        want["out_bias"] = ((input_dim,), ("embed",))
    assert {name: (s.shape, s.dims) for name, s in specs.items()} == want
    assert specs["q"].fans == (input_dim, 12)
    assert specs["out"].fans == (12, input_dim)


def test_head_dim_is_by_default_a_part_of_input_dim() -> None:
    specs = MultiHeadAttention.Params(input_dim=6, num_heads=3).instantiate().specs()
    assert specs["q"].shape == (6, 3, 2)


def test_what_cannot_be_is_refused_when_built() -> None:
    params = MultiHeadAttention.Params(input_dim=6, num_heads=4)
    with pytest.raises(ValueError, match="num_heads 4 does not divide input_dim 6; set head_dim"):
        params.instantiate()
    with pytest.raises(ValueError, match="num_kv_heads 3 does not divide num_heads 4"):
        build(num_kv_heads=3)
    with pytest.raises(ValueError, match=r"dropout_rate 1.0 is not in \[0, 1\)"):
        build(dropout_rate=1.0)
    with pytest.raises(ValueError, match="memory_dim 7 makes this cross-attention"):
        build(memory_dim=7, mask="causal")


def test_memory_and_memory_dim_go_together() -> None:
    layer, theta = build()
    with pytest.raises(ValueError, match="memory_dim is None, but a memory was given"):
        layer.fprop(theta, random(B, T, D), StepContext(), memory=random(B, S, D))
    layer, theta = build(memory_dim=D)
    with pytest.raises(ValueError, match="memory_dim is 6, but no memory was given"):
        layer.fprop(theta, random(B, T, D), StepContext())


def test_cache_needs_a_causal_mask() -> None:
    with pytest.raises(ValueError, match="needs mask='causal', but mask is 'none'"):
        build()[0].init_cache(B, T)


def test_several_rows_ask_one_row_of_a_memory_as_if_it_were_repeated() -> None:
    layer, theta = build(memory_dim=7, num_kv_heads=2)
    x, memory, ctx = tf.constant(random(3 * B, T, D)), random(B, S, 7), StepContext()
    is_token = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    ready = layer.keys_and_values(theta, tf.constant(memory), ctx)
    wide = {name: tf.repeat(value, 3, axis=0) for name, value in ready.items()}
    mask, wide_mask = (masking.padding(tf.constant(m)) for m in (is_token, is_token.repeat(3, 0)))

    def run(memory: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        ctx = collecting_attention(StepContext())
        y = layer.attend_to(theta, x, memory, ctx, mask=mask)
        return y, ctx.collected.attention_weights()

    for got, want in zip(run(ready, mask), run(wide, wide_mask), strict=True):
        np.testing.assert_allclose(got, want, **TOLERANCE)
    with pytest.raises(ValueError, match=r"5 rows, .* multiple of the 2 rows"):
        layer.attend_to(theta, x[:5], ready, ctx)


def test_attention_weights_are_on_visible_keys_alone() -> None:
    layer, theta = build(mask="causal", positions=RotaryPositions.Params(), window=3)
    x, ctx = tf.constant(random(B, T, D)), StepContext()

    requesting = collecting_attention(ctx)
    layer.fprop(theta, x, requesting, prefix=1)

    attention_weights = requesting.collected.attention_weights()
    np.testing.assert_allclose(tf.reduce_sum(attention_weights, -1), np.ones([B, T]), rtol=1e-5)
    for t in range(T):
        seen = sorted({0, *range(max(0, t - 2), t + 1)})
        assert np.flatnonzero(attention_weights[0, t] > 0).tolist() == seen
    cache = layer.init_cache(B, T + 1)
    _, cache = layer.extend_step(theta, x[:, :3], cache, 0, ctx, prefix=1)
    requesting = collecting_attention(ctx)
    layer.extend_step(theta, x[:, 3:], cache, 3, requesting, prefix=1)
    step = requesting.collected.attention_weights()
    np.testing.assert_allclose(step[..., :T], attention_weights[:, 3:], **TOLERANCE)


def test_attention_weights_have_no_dropout_and_are_computed_on_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> tf.Tensor:
        calls.append(args)
        return mean_probabilities(*args, **kwargs)

    monkeypatch.setattr(attention_module, "mean_probabilities", counted)
    layer, theta = build(mask="causal", dropout_rate=0.5)
    x, train = tf.constant(random(B, T, D)), StepContext(mode="train")

    plain = layer.fprop(theta, x, train)
    assert not calls
    requesting = [collecting_attention(ctx) for ctx in (train, StepContext())]
    y, _ = (layer.fprop(theta, x, ctx) for ctx in requesting)

    np.testing.assert_array_equal(y, plain)
    assert not calls
    np.testing.assert_array_equal(*(ctx.collected.attention_weights() for ctx in requesting))
    assert len(calls) == 2


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_of_a_cache_may_differ_from_its_places(
    positions: AttentionPositions.Params | None,
) -> None:
    layer, theta = build(mask="causal", positions=positions)
    x, at = tf.constant(random(B, T, D)), np.array([[0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 3, 4]])
    want = layer.fprop(theta, x, StepContext(), positions=tf.constant(at[:, :T]), prefix=2)

    cache, ctx = layer.init_cache(B, T + 1), StepContext()
    first, cache = layer.extend_step(
        theta, x[:, :3], cache, 0, ctx, positions=tf.constant(at), prefix=2
    )
    later, _ = layer.extend_step(theta, x[:, 3:], cache, [3, 3], ctx, positions=tf.constant(at))

    np.testing.assert_allclose(tf.concat([first, later], 1), want, **TOLERANCE)
