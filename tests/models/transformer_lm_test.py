"""TransformerLm: a whole model in NumPy, counts of published ones, decoding, packing, pieces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.pieces import joined, run_all
from tekso.framework.theta import Theta
from tekso.models.decoder_only import CAUSAL_LAYER
from tekso.models.layers.attention_positions import RotaryPositions
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import GatedFeedForward
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.models.transformer_lm import TransformerLm

B, T, V, D, N, F, L = 2, 5, 11, 6, 2, 7, 2


def params(kind: type[Any] = Stack, **fields: Any) -> TransformerLm.Params:
    """A small model: sinusoidal positions, pre-norm, ReLU, biases, tied."""
    p = TransformerLm.Params(vocab_size=V, dim=D)
    p.stack = kind.Params(num_layers=L, layer=CAUSAL_LAYER)
    p.set({"stack.layer.attention.num_heads": N, "stack.layer.feed_forward.hidden_dim": F})
    return p.set(fields)


def rotary_params(kind: type[Any] = Stack) -> TransformerLm.Params:
    """Rotary positions, RMS norm, gated feed-forward part, no biases, untied."""
    p = params(kind, positions=None, final_norm=RMSNorm.Params(), softmax=Softmax.Params())
    layer = p.stack.layer
    layer.norm = RMSNorm.Params()
    layer.feed_forward = GatedFeedForward.Params(hidden_dim=F)
    layer.attention.set(use_bias=False, head_dim=4, positions=RotaryPositions.Params())
    return p


def learned_params(kind: type[Any] = Stack) -> TransformerLm.Params:
    """Learned positions, post-norm, GELU, dropout everywhere."""
    p = params(kind, positions=LearnedPositions.Params(max_length=T + 2), final_norm=None)
    p.set({"stack.layer.norm_position": "post", "stack.layer.feed_forward.activation": "gelu"})
    return p.set({"*dropout_rate": 0.2})


CONFIGURATIONS = [params, rotary_params, learned_params]


def tokens(seed: int = 0, *, shape: tuple[int, ...] = (B, T)) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).integers(0, V, shape), tf.int32)


def numpy_lm(theta: Any, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The model of `params()`, position by position where that matters."""
    w = {path: np.float64(value) for path, value in theta_lib.flatten(theta).items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return centred / deviation * w[f"{name}/scale"] + w[f"{name}/bias"]

    half = D // 2
    angles = np.arange(T)[:, None] * 1e4 ** (-np.arange(half) / (half - 1))
    x = w["embedding/table"][ids] * math.sqrt(D)
    x = x + np.concatenate([np.sin(angles), np.cos(angles)], 1)
    for i in range(L):
        head = f"stack/layers/{i}/"
        y = norm(x, f"{head}attention_norm")
        q, k, v = (
            np.einsum("btd,dnh->bnth", y, w[f"{head}attention/{c}"])
            + w[f"{head}attention/{c}_bias"][:, None]
            for c in "qkv"
        )
        attended = np.zeros_like(q)
        for t in range(T):
            scores = np.einsum("bnh,bnsh->bns", q[:, :, t], k[:, :, : t + 1]) / math.sqrt(D / N)
            e = np.exp(scores)
            probs = e / e.sum(-1, keepdims=True)
            attended[:, :, t] = np.einsum("bns,bnsh->bnh", probs, v[:, :, : t + 1])
        x = x + np.einsum("bnth,nhd->btd", attended, w[f"{head}attention/out"])
        x = x + w[f"{head}attention/out_bias"]
        y = norm(x, f"{head}feed_forward_norm")
        y = np.maximum(y @ w[f"{head}feed_forward/hidden/w"] + w[f"{head}feed_forward/hidden/b"], 0)
        x = x + y @ w[f"{head}feed_forward/output/w"] + w[f"{head}feed_forward/output/b"]
    logits = norm(x, "final_norm") @ w["embedding/table"].T
    log_total = np.log(np.exp(logits).sum(-1))
    return log_total - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def perturbed(model: TransformerLm, dtype: Any = tf.float32) -> Theta:
    """A theta in which no weight is 0 or 1."""
    r = np.random.default_rng(5)
    return theta_lib.map_leaves(
        lambda w: tf.cast(w + r.standard_normal(w.shape) / 5, dtype), model.init(seed=1)
    )


def test_cross_entropy_is_that_of_the_formula() -> None:
    model = params(embedding=Embedding.Params(scale="sqrt_dim")).instantiate()
    theta, ids, labels = perturbed(model), tokens(), tokens(1)

    got = model.token_cross_entropy(theta, ids, labels, StepContext())

    np.testing.assert_allclose(got, numpy_lm(theta, ids.numpy(), labels.numpy()), rtol=2e-5)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_gradient_is_the_slope_of_the_loss(configuration: Any) -> None:
    model = configuration().instantiate()
    theta, ids, labels = perturbed(model, tf.float64), tokens(), tokens(1)
    flat = theta_lib.flatten(theta)
    r = np.random.default_rng(3)
    direction = {path: r.standard_normal(w.shape) for path, w in flat.items()}

    @tf.function(autograph=False)
    def loss(step: tf.Tensor) -> tf.Tensor:
        moved = theta_lib.unflatten({p: w + step * direction[p] for p, w in flat.items()})
        moved = model.theta(theta_lib.flatten(moved))
        ctx = StepContext(mode="train", seed=2)
        return tf.reduce_sum(model.token_cross_entropy(moved, ids, labels, ctx))

    step = tf.constant(0.0, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(step)
        value = loss(step)
    slope = tape.gradient(value, step)
    up, down = (float(loss(tf.constant(e, tf.float64))) for e in (1e-6, -1e-6))

    assert float(slope) == pytest.approx((up - down) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("kind", [Stack, RepeatedStack])
def test_decoding_by_blocks_equals_the_full_pass(configuration: Any, kind: type[Any]) -> None:
    model = configuration(kind).instantiate()
    theta, ids, ctx = perturbed(model), tokens(), StepContext(mode="decode")
    want = model.logits(theta, ids, ctx)

    cache = model.init_cache(B, T + 2)
    first, cache = model.extend_step(theta, ids[:, :3], cache, tf.constant(0), ctx)
    second, cache = model.extend_step(theta, ids[:, 3:4], cache, tf.constant(3), ctx)
    third, _ = model.extend_step(theta, ids[:, 4:], cache, tf.constant([4, 4]), ctx)

    got = tf.concat([first, second, third], 1)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    cache = model.init_cache(B, T)
    last, _ = model.extend_step(theta, ids, cache, 0, ctx, logits_of="last")
    np.testing.assert_allclose(last, want[:, -1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_token_is_predicted_from_those_before_it_alone(configuration: Any) -> None:
    model = configuration().instantiate()
    theta, ids = perturbed(model), tokens().numpy()
    changed = ids.copy()
    changed[:, 3] = (changed[:, 3] + 1) % V

    before, after = (model.fprop(theta, tf.constant(i), StepContext()) for i in (ids, changed))

    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3:] - after[:, 3:]).min(-1).max() > 0


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("kind", [Stack, RepeatedStack])
def test_packed_texts_are_read_as_if_alone(configuration: Any, kind: type[Any]) -> None:
    model = configuration(kind).instantiate()
    theta = perturbed(model)
    one, other = tokens(shape=(1, 3)), tokens(1, shape=(1, 2))
    alone = [model.logits(theta, ids, StepContext()) for ids in (one, other)]

    packed = model.logits(
        theta,
        tf.concat([one, other], 1),
        StepContext(),
        positions=tf.constant([[0, 1, 2, 0, 1]]),
        segment_ids=tf.constant([[1, 1, 1, 2, 2]]),
    )

    np.testing.assert_allclose(packed, tf.concat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("kind", [Stack, RepeatedStack])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_one_after_the_other_are_the_model(
    configuration: Any, kind: type[Any], packed: bool
) -> None:
    model = configuration(kind).instantiate()
    theta, ids, labels = perturbed(model), tokens(), tokens(1)
    side = {}
    if packed:
        side["positions"] = tf.constant([[0, 1, 2, 0, 1]] * B)
        side["segment_ids"] = tf.constant([[1, 1, 1, 2, 2]] * B)
    ctx = StepContext(mode="train", step=3)
    want = model.token_cross_entropy(theta, ids, labels, ctx, label_smoothing=0.1, **side)

    flat = theta_lib.flatten(theta)
    pieces = model.pieces(label_smoothing=0.1)
    flow: dict[str, Any] = {"ids": ids, "labels": labels, **side}
    joint = run_all(joined(pieces), flat, flow, ctx)
    for piece in pieces:
        rows = slice(None) if piece.rows is None else slice(*piece.rows)
        own = {path: tensor[rows] for path, tensor in flat.items() if piece.owns(path)}
        flow = piece.run(piece.theta(own), flow, ctx)

    np.testing.assert_allclose(flow["cross_entropy"], want, rtol=1e-5)
    np.testing.assert_allclose(joint["cross_entropy"], want, rtol=1e-5)
    layers = [f"stack/layers/{i}" for i in range(L)]
    norms = ["final_norm"] if model.params.final_norm else []
    assert [piece.name for piece in pieces] == ["embedding", *layers, *norms, "softmax"]
    assert all(any(piece.owns(path) for piece in pieces) for path in flat)


def test_rematerialised_model_has_the_same_weights_and_loss() -> None:
    p = learned_params()
    wrapped = p.copy()
    wrapped.stack.layer = Rematerialize.Params(layer=p.stack.layer)
    model, same = p.instantiate(), wrapped.instantiate()
    theta, ctx = perturbed(model), StepContext(mode="train", step=3)

    got = same.token_cross_entropy(theta, tokens(), tokens(1), ctx)

    assert same.specs().keys() == model.specs().keys()
    want = model.token_cross_entropy(theta, tokens(), tokens(1), ctx)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_label_smoothing_mixes_in_the_mean_over_the_vocabulary() -> None:
    model = params().instantiate()
    theta, ids, labels = perturbed(model), tokens(), tokens(1)

    got = model.token_cross_entropy(theta, ids, labels, StepContext(), label_smoothing=0.3)

    log_probs = tf.nn.log_softmax(model.logits(theta, ids, StepContext())).numpy()
    picked = np.take_along_axis(log_probs, labels.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(got, -(0.7 * picked + 0.3 * log_probs.mean(-1)), rtol=1e-4)


def count(p: TransformerLm.Params) -> int:
    return sum(spec.size for spec in p.instantiate().specs().values())


def mesh_tensorflow_params(
    kind: type[Any], d_ff: int, heads: int, *, dim: int = 1024, vocab: int = 32768, layers: int = 6
) -> TransformerLm.Params:
    p = TransformerLm.Params(
        vocab_size=vocab, dim=dim, final_norm=RMSNorm.Params(), softmax=Softmax.Params()
    )
    p.stack = kind.Params(num_layers=layers, layer=CAUSAL_LAYER)
    p.stack.layer.norm = RMSNorm.Params()
    p.stack.layer.attention.set(num_heads=heads, head_dim=256, use_bias=False)
    p.stack.layer.feed_forward.set(hidden_dim=d_ff, use_bias=False)
    return p


@pytest.mark.parametrize(
    ("d_ff", "heads", "total"), [(4096, 4, 142_619_648), (8192, 8, 218_117_120)]
)
@pytest.mark.parametrize("kind", [Stack, RepeatedStack])
def test_mesh_tensorflow_counts_are_exact(
    kind: type[Any], d_ff: int, heads: int, total: int
) -> None:
    assert count(mesh_tensorflow_params(kind, d_ff, heads)) == total


def gpipe_params(
    num_layers: int, *, dim: int = 2048, vocab: int = 32000, d_ff: int = 8192, heads: int = 32
) -> TransformerLm.Params:
    p = TransformerLm.Params(
        vocab_size=vocab, dim=dim, final_norm=None, softmax=Softmax.Params(use_bias=True)
    )
    p.stack = Stack.Params(num_layers=num_layers, layer=CAUSAL_LAYER)
    p.stack.layer.set({"attention.num_heads": heads, "feed_forward.hidden_dim": d_ff})
    return p


@pytest.mark.parametrize(("num_layers", "total"), [(3, 282_178_816), (13, 785_761_536)])
def test_gpipe_counts_are_exact(num_layers: int, total: int) -> None:
    assert count(gpipe_params(num_layers)) == total


@settings(max_examples=25)
@given(
    st.integers(1, 9), st.integers(1, 8), st.integers(2, 50), st.integers(1, 9), st.integers(1, 9)
)
def test_counts_of_other_sizes_follow_the_formulas(
    layers: int, heads: int, vocab: int, hidden: int, max_length: int
) -> None:
    d = 8 * heads
    mesh = mesh_tensorflow_params(Stack, hidden, heads, dim=d, vocab=vocab, layers=layers)
    a_layer = 4 * d * 256 * heads + 2 * d * hidden + 2 * d
    assert count(mesh) == layers * a_layer + d + 2 * vocab * d

    gpipe = gpipe_params(layers, dim=d, vocab=vocab, d_ff=4 * d, heads=heads)
    assert count(gpipe) == layers * (12 * d * d + 13 * d) + 2 * vocab * d + vocab

    gpt = gpipe_params(layers, dim=d, vocab=vocab, d_ff=4 * d, heads=heads)
    gpt.set(softmax=None, positions=LearnedPositions.Params(max_length=max_length))
    # Narayanan et al. 2021, eq. 2, with its sizes multiplied out; it leaves out a final norm.
    assert count(gpt) == 12 * layers * d**2 + 13 * layers * d + (vocab + max_length) * d


def test_attention_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stack/layers/0/attention has mask='none'"):
        params().set({"stack.layer.attention.mask": "none"}).instantiate()


def test_sizes_that_contradict_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Embedding.Params.dim is 5, .* it has 6"):
        params(embedding=Embedding.Params(dim=5)).instantiate()
