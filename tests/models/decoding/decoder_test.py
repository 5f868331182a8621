"""What every model of target given source keeps to: padding, packing, decoding, pieces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext, filling_in_place
from tekso.framework.pieces import joined, run_all
from tekso.framework.theta import Theta
from tekso.models.decoder_only import CAUSAL_LAYER
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.forced import score_targets
from tekso.models.encoder_decoder import DECODER_LAYER, ENCODER_LAYER, EncoderDecoder
from tekso.models.layers.attention_positions import RelativeBias, RotaryPositions
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import GatedFeedForward
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.models.lstm_encoder_decoder import LstmEncoderDecoder
from tekso.models.prefix_lm import PrefixLm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sentence_pairs

V, D = 11, 6
SIZES = [(4, 3), (2, 5), (5, 2)]  # tokens of source and target of three pairs
S, T = 5, 5


def encoder_decoder(kind: Any = Stack, **fields: Any) -> EncoderDecoder.Params:
    """Sinusoidal positions, pre-norm, biases, one table for all."""
    p = EncoderDecoder.Params(source_vocab_size=V, target_vocab_size=V, dim=D)
    p.encoder = kind.Params(num_layers=2, layer=ENCODER_LAYER)
    p.decoder = kind.Params(num_layers=3, layer=DECODER_LAYER)
    p.set({"*num_heads": 2, "*hidden_dim": 7})
    return p.set(fields)


def apart() -> EncoderDecoder.Params:
    """Post-norm, learned positions, three tables, grouped queries, dropout, gated, no biases."""
    p = encoder_decoder(
        source_vocab_size=V + 2,
        source_embedding=Embedding.Params(scale="sqrt_dim"),
        softmax=Softmax.Params(use_bias=True),
        source_positions=LearnedPositions.Params(max_length=S + 4),
        target_positions=LearnedPositions.Params(max_length=T + 4),
        encoder_norm=None,
        decoder_norm=None,
    )
    p.set({"*norm_position": "post", "*dropout_rate": 0.2, "*use_bias": False})
    p.decoder.layer.feed_forward = GatedFeedForward.Params(hidden_dim=7)
    p.decoder.layer.memory_attention.num_kv_heads = 1
    return p


def repeated() -> EncoderDecoder.Params:
    """Repeated stacks, relative positions of two kinds, RMS norm, rematerialised, tied target."""
    p = encoder_decoder(
        RepeatedStack,
        source_embedding=Embedding.Params(),
        source_positions=None,
        target_positions=None,
        encoder_norm=RMSNorm.Params(),
    )
    positions = RelativeBias.Params(causal=False, num_buckets=8, max_distance=9)
    p.encoder.layer.attention.positions = positions
    p.decoder.layer.attention.set(head_dim=4, positions=RotaryPositions.Params())
    p.decoder.layer = Rematerialize.Params(layer=p.decoder.layer)
    return p


def prefix_lm(kind: Any = Stack) -> PrefixLm.Params:
    """Sinusoidal positions, pre-norm, biases, dropout, tied; the prefix is beyond the window."""
    p = PrefixLm.Params(source_vocab_size=V, target_vocab_size=V, dim=D, dropout_rate=0.1)
    p.stack = kind.Params(num_layers=2, layer=CAUSAL_LAYER)
    return p.set({"*num_heads": 2, "*hidden_dim": 7, "stack.layer.attention.window": 2})


def repeated_prefix_lm() -> PrefixLm.Params:
    """A repeated stack, post-norm, rotary positions, untied."""
    p = prefix_lm(RepeatedStack)
    p.set(positions=None, final_norm=None, softmax=Softmax.Params())
    p.stack.layer.set({"norm_position": "post", "attention.head_dim": 4})
    p.stack.layer.attention.positions = RotaryPositions.Params()
    return p


def lstm() -> LstmEncoderDecoder.Params:
    """A bidirectional layer, attention, dropout."""
    cell = LstmCell.Params(hidden_dim=8)
    return LstmEncoderDecoder.Params(
        source_vocab_size=V,
        target_vocab_size=V,
        dim=D,
        dropout_rate=0.1,
        encoder=RecurrentStack.Params(num_layers=2, cell=cell, direction="bidirectional_first"),
        decoder=RecurrentDecoder.Params(num_layers=2, cell=cell),
    )


MODELS = {
    "encoder_decoder": encoder_decoder,
    "apart": apart,
    "repeated": repeated,
    "prefix_lm": prefix_lm,
    "repeated_prefix_lm": repeated_prefix_lm,
    "lstm": lstm,
}


def matrix(*values: Any) -> Any:
    """Parameters of a test that no path of the code has to itself: `make test-matrix` runs it."""
    return pytest.param(*values, marks=pytest.mark.matrix)


# The parts of these two are in "prefix_lm" (pre-norm, sinusoidal, tied) and in "repeated" (loops,
# rotary) as well.
@pytest.fixture(
    params=[
        *sample(["apart", "prefix_lm", "lstm", "repeated"], quick=["apart", "prefix_lm", "lstm"]),
        matrix("encoder_decoder"),
        matrix("repeated_prefix_lm"),
    ]
)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]().instantiate()


def perturbed(model: Any) -> Theta:
    """A theta in which no weight is 0 or 1."""
    r = np.random.default_rng(5)
    return theta_lib.map_leaves(
        lambda w: tf.cast(w + r.standard_normal(w.shape) / 3, tf.float32), model.init(seed=1)
    )


def padded(*, source: int = S, target: int = T) -> dict[str, tf.Tensor]:
    return sentence_pairs.batch(
        [[p] for p in sentence_pairs.random_pairs(0, SIZES, V)], source, target
    )


def close(got: Any, want: Any, *, within: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=within, atol=within)


def test_cross_entropy_is_that_of_the_logits(model: Any) -> None:
    theta, batch, ctx = perturbed(model), padded(), StepContext()

    got = model.token_cross_entropy(theta, batch, ctx, label_smoothing=0.3)

    log_probs = tf.nn.log_softmax(model.logits(theta, batch, ctx)).numpy()
    picked = np.take_along_axis(log_probs, batch["target_labels"].numpy()[..., None], -1)[..., 0]
    close(got, -(0.7 * picked + 0.3 * log_probs.mean(-1)), within=1e-4)


def test_padding_changes_nothing_and_gives_finite_numbers(model: Any) -> None:
    theta, ctx, more = perturbed(model), StepContext(), padded(source=S + 3, target=T + 2)
    logits, attention = (f(theta, padded(), ctx) for f in (model.logits, model.attention))

    padded_logits, padded_attention = (f(theta, more, ctx) for f in (model.logits, model.attention))

    real = padded()["target_weights"].numpy() > 0
    close(padded_logits[:, :T][real], logits[real])
    close(padded_attention[:, :T, :S][real], attention[real])
    assert np.isfinite(padded_logits).all()
    close(attention.numpy().sum(-1)[real], 1.0)
    for i, (source, _) in enumerate(SIZES):
        assert np.abs(padded_attention[i, :, source:]).max() == 0


def test_packed_pairs_are_read_as_if_alone(model: Any) -> None:
    theta, ctx, found = perturbed(model), StepContext(), sentence_pairs.random_pairs(0, SIZES, V)
    packed = sentence_pairs.batch([[found[0], found[1]], [found[2]]], 7, 9, packed=True)

    got = model.token_cross_entropy(theta, packed, ctx)
    attention_weights = model.attention(theta, packed, ctx)

    alone = [sentence_pairs.batch([[pair]], *size) for pair, size in zip(found, SIZES, strict=True)]
    want = [model.token_cross_entropy(theta, one, ctx)[0] for one in alone]
    close(got[0, :8], tf.concat(want[:2], 0), within=2e-5)
    close(got[1, :2], want[2], within=2e-5)
    close(attention_weights[0, 3:8, 4:6], model.attention(theta, alone[1], ctx)[0])
    assert np.abs(attention_weights[0, 3:8, :4]).max() == 0


def test_a_token_is_predicted_from_those_before_it_and_all_of_the_source(model: Any) -> None:
    theta, ctx, batch = perturbed(model), StepContext(), padded()

    def logits_where(name: str, place: int) -> np.ndarray:
        ids = batch[name].numpy()
        ids[:, place] = (ids[:, place] + 1) % V
        return model.logits(theta, {**batch, name: tf.constant(ids)}, ctx).numpy()

    before = model.logits(theta, batch, ctx).numpy()
    after = logits_where("target_ids", 1)
    np.testing.assert_array_equal(before[:, :1], after[:, :1])
    assert np.abs(before[:, 1] - after[:, 1]).max(-1).min() > 1e-4
    after = logits_where("source_ids", 1)  # every source has it
    assert np.abs(before[:, 0] - after[:, 0]).max(-1).min() > 1e-5


def decoded(
    model: Any, theta: Theta, batch: Any, ids: tf.Tensor, *, k: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits and attention, one step after the other, of [N, T] tokens that are read."""
    ctx = StepContext(mode="decode")
    state = model.expand(model.start_decoding(theta, batch, max_length, ctx), k)
    logits, attention_weights = [], []
    for t in range(ids.shape[1]):
        step = model.decode_step(theta, ids[:, t], state, tf.constant(t), ctx)
        tf.nest.assert_same_structure(state, step.state)
        assert [x.shape for x in tf.nest.flatten(state)] == [
            x.shape for x in tf.nest.flatten(step.state)
        ]
        state = step.state
        logits.append(step.logits)
        attention_weights.append(step.attention)
    return np.stack(logits, 1), np.stack(attention_weights, 1)


@pytest.mark.parametrize("k", [3, matrix(1)])  # 1 is in the test of select, too
def test_steps_equal_the_whole_target_at_once(model: Any, k: int) -> None:
    theta, batch = perturbed(model), padded()
    ids = tf.constant(np.random.default_rng(2).integers(1, V, [3 * k, T]), tf.int32)

    logits, attention_weights = decoded(model, theta, batch, ids, k=k, max_length=T + 2)

    whole = {name: tf.repeat(value, k, axis=0) for name, value in batch.items()}
    whole |= {"target_ids": ids, "target_segment_ids": tf.ones_like(ids)}
    close(logits, model.logits(theta, whole, StepContext()))
    close(attention_weights, model.attention(theta, whole, StepContext()))


def test_sources_are_kept_once(model: Any) -> None:
    theta, ctx = perturbed(model), StepContext(mode="decode")
    state = model.start_decoding(theta, padded(), 4, ctx)

    wide = model.expand(state, 7)

    kept = [
        (a.shape, b.shape)
        for a, b in zip(tf.nest.flatten(state), tf.nest.flatten(wide), strict=True)
        if a.shape == b.shape
    ]
    grown = {n for x in tf.nest.flatten(wide) for n in x.shape if n == 21}
    assert kept
    assert grown == {21}


def test_select_reorders_hypotheses_within_their_source(model: Any) -> None:
    theta, batch, ctx = perturbed(model), padded(), StepContext(mode="decode")
    k, rows = 2, tf.constant([1, 0, 2, 2, 4, 5])
    first, second = tf.constant([1, 2, 3, 4, 5, 6]), tf.constant([6, 5, 4, 3, 2, 1])
    state = model.expand(model.start_decoding(theta, batch, 4, ctx), k)

    state = model.decode_step(theta, first, state, tf.constant(0), ctx).state
    got = model.decode_step(theta, second, model.select(state, rows), tf.constant(1), ctx)

    ids = tf.stack([tf.gather(first, rows), second], 1)
    want, attention_weights = decoded(model, theta, batch, ids, k=k, max_length=4)
    close(got.logits, want[:, 1])
    close(got.attention, attention_weights[:, 1])
    fewer = model.select(state, tf.constant([1, 3, 4]))
    got = model.decode_step(theta, second[:3], fewer, tf.constant(1), ctx)
    ids = tf.stack([tf.gather(first, [1, 3, 4]), second[:3]], 1)
    want, _ = decoded(model, theta, batch, ids, k=1, max_length=4)
    close(got.logits, want[:, 1])


def test_more_padding_and_room_change_no_step(model: Any) -> None:
    theta = perturbed(model)
    ids = tf.constant(np.random.default_rng(2).integers(1, V, [6, 3]), tf.int32)

    logits, attention_weights = decoded(model, theta, padded(), ids, k=2, max_length=3)
    more = decoded(model, theta, padded(source=S + 3), ids, k=2, max_length=6)

    close(more[0], logits)
    close(more[1][..., :S], attention_weights)


def test_a_source_of_padding_alone_gives_finite_numbers(model: Any) -> None:
    theta, batch = perturbed(model), padded()
    empty = tf.zeros_like(batch["source_segment_ids"])
    batch = {**batch, "source_segment_ids": empty, "target_segment_ids": tf.zeros([3, T], tf.int32)}
    ids = tf.ones([6, 3], tf.int32)

    logits, attention_weights = decoded(model, theta, batch, ids, k=2, max_length=3)
    with tf.GradientTape() as tape:
        tape.watch(tf.nest.flatten(theta))
        nats = model.token_cross_entropy(theta, batch, StepContext())
    gradients = tape.gradient(nats, tf.nest.flatten(theta))

    assert np.isfinite(logits).all() and np.isfinite(nats).all()
    assert np.abs(attention_weights).max() == 0
    assert all(np.isfinite(tf.convert_to_tensor(g)).all() for g in gradients if g is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [matrix("apart"), "prefix_lm", "repeated", "lstm"])
def test_compiled_loops_of_steps_equal_the_whole_target_at_once(name: str) -> None:
    model, k, end = MODELS[name]().instantiate(), 2, sentence_pairs.END
    theta, batch, ctx = perturbed(model), padded(), StepContext(mode="decode")
    targets = tf.constant(np.random.default_rng(2).integers(1, V, [3, k, 4]), tf.int32)
    lengths = np.array([[4, 2], [1, 4], [3, 0]], np.int32)

    @tf.function(autograph=False, jit_compile=True)
    def score(theta: Theta, batch: Any, targets: tf.Tensor, lengths: tf.Tensor) -> Any:
        return score_targets(model, theta, batch, targets, lengths, ctx, end, return_attention=True)

    @tf.function(autograph=False, jit_compile=True)
    def search(theta: Theta, batch: Any) -> Any:
        beam = BeamSearch.Params(beam_size=k, num_hypotheses=k, max_length=4).instantiate()
        return beam.search(model, theta, batch, ctx, end)

    scored = score(theta, batch, targets, tf.constant(lengths))

    labels = tf.reshape(targets, [3 * k, 4])
    read = tf.concat([tf.fill([3 * k, 1], end), labels[:, :-1]], 1)
    whole = {name: tf.repeat(value, k, axis=0) for name, value in batch.items()}
    whole |= {"target_ids": read, "target_labels": labels}
    whole["target_segment_ids"] = tf.ones_like(labels)
    is_token = (np.arange(4) < lengths[..., None]).astype(np.float32)
    nats = tf.reshape(model.token_cross_entropy(theta, whole, ctx), [3, k, 4])
    attention_weights = tf.reshape(model.attention(theta, whole, ctx), [3, k, 4, S])
    close(scored["token_log_probs"], -is_token * nats, within=2e-5)
    close(scored["log_probs"], -(is_token * nats).numpy().sum(-1), within=2e-5)
    close(scored["attention"], is_token[..., None] * attention_weights, within=2e-5)
    found = search(theta, batch)
    again = score(theta, batch, found["ids"], found["lengths"])
    close(again["log_probs"], found["log_probs"], within=2e-5)


def test_pieces_one_after_the_other_are_the_model(model: Any) -> None:
    theta, ctx = perturbed(model), StepContext(mode="train", step=3)
    found = sentence_pairs.random_pairs(0, SIZES, V)
    batch = sentence_pairs.batch([[found[0], found[1]], [found[2]]], 7, 9, packed=True)
    want = model.token_cross_entropy(theta, batch, ctx, label_smoothing=0.1)

    flat = theta_lib.flatten(theta)
    pieces = model.pieces(label_smoothing=0.1)
    flow: dict[str, Any] = dict(batch)
    joint = run_all(joined(pieces), flat, flow, ctx)
    for piece in pieces:
        rows = slice(None) if piece.rows is None else slice(*piece.rows)
        own = {path: tensor[rows] for path, tensor in flat.items() if piece.owns(path)}
        flow = piece.run(piece.theta(own), flow, ctx)

    close(flow["cross_entropy"], want)
    close(joint["cross_entropy"], want)
    assert all(any(piece.owns(path) for piece in pieces) for path in flat)


@pytest.mark.parametrize("name", sample(["apart", "repeated", "prefix_lm"], quick=["prefix_lm"]))
def test_gradients_reach_every_weight_alike_compiled_or_not(name: str) -> None:
    params = MODELS[name]()
    if name == "apart":
        params.set({"*num_layers": 1})  # XLA compiles each layer
    model = params.instantiate()
    theta, batch = perturbed(model), padded()
    flat = theta_lib.flatten(theta)

    def gradients(*weights: tf.Tensor) -> Any:
        own = model.theta(dict(zip(flat, weights, strict=True)))
        with tf.GradientTape() as tape:
            tape.watch(weights)
            ctx = StepContext(mode="train", step=3)
            nats = model.token_cross_entropy(own, batch, ctx, label_smoothing=0.1)
            loss = tf.reduce_sum(nats * batch["target_weights"])
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]

    plain = gradients(*flat.values())
    compiled = tf.function(gradients, autograph=False, jit_compile=True)(*flat.values())
    for path, one, other in zip(flat, plain, compiled, strict=True):
        scale = max(1.0, np.abs(one).max())
        assert np.abs(one).max() > 0 or path.endswith("k_bias"), path
        np.testing.assert_allclose(other, one, atol=5e-5 * scale, err_msg=path)


@pytest.mark.parametrize(
    ("name", "beam_size"),
    [
        *sample(
            [("prefix_lm", 3), ("prefix_lm", 1), ("apart", 3), ("repeated", 3), ("lstm", 3)],
            quick=[("prefix_lm", 3)],
        ),
        *(matrix(name, 1) for name in ("apart", "repeated", "lstm")),
    ],
)
def test_a_search_that_fills_caches_in_place_finds_the_same(name: str, beam_size: int) -> None:
    model = MODELS[name]().instantiate()
    theta, batch = perturbed(model), padded()
    source = {name: batch[name] for name in ("source_ids", "source_segment_ids")}
    search = BeamSearch.Params(beam_size=beam_size, max_length=T + 4, stop="never").instantiate()

    def found(ctx: StepContext) -> Any:
        @tf.function(autograph=False)
        def run(source: Any) -> Any:
            return search.search(model, theta, source, ctx, sentence_pairs.END)

        return run(source)

    ctx = StepContext(mode="decode")
    want, got = found(ctx), found(filling_in_place(ctx))
    assert want["lengths"].numpy().max() > 3
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


@pytest.mark.parametrize(
    "name",
    [*sample(["lstm", "repeated"], quick=["lstm"]), matrix("apart"), matrix("prefix_lm")],
)
def test_a_beam_as_wide_as_the_space_finds_the_most_likely_targets(name: str) -> None:
    model = MODELS[name]().instantiate()
    theta, batch, end = perturbed(model), padded(), sentence_pairs.END
    others = range(1, V)
    space = [[end], *([a, end] for a in others), *([a, b, end] for a in others for b in others)]
    # As wide as all that has three tokens, with an end or not: those compete for the beam too.
    search = BeamSearch.Params(
        beam_size=1110, num_hypotheses=5, length_normalization=0.0, max_length=3
    ).instantiate()

    @tf.function(autograph=False)
    def run(batch: Any) -> Any:
        return search.search(model, theta, batch, StepContext(mode="decode"), end)

    found = run({name: batch[name] for name in ("source_ids", "source_segment_ids")})

    labels = np.array([[*target, end, end][:3] for target in space], np.int32)
    read = np.concatenate([np.full([len(space), 1], end), labels[:, :-1]], 1)
    weights = np.arange(3) < np.array([len(target) for target in space])[:, None]
    for i in range(len(SIZES)):
        source = {k: tf.repeat(v[i : i + 1], len(space), 0) for k, v in batch.items()}
        target = {"ids": read, "labels": labels, "segment_ids": weights}
        target = {f"target_{k}": tf.constant(v.astype(np.int32)) for k, v in target.items()}
        nats = model.token_cross_entropy(theta, {**source, **target}, StepContext())
        log_probs = -(nats.numpy() * weights).sum(1)
        best = np.argsort(-log_probs)[:5]
        close(found["log_probs"][i], log_probs[best], within=1e-4)
        lengths = found["lengths"][i].numpy()
        got = [ids[:n].tolist() for ids, n in zip(found["ids"][i].numpy(), lengths, strict=True)]
        assert got == [space[n] for n in best]
