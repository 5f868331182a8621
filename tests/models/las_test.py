"""LAS: decoding step by step, scheduled sampling, location-aware attention, the pyramid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.las import Las
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.location_attention import LocationAwareAttention
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.source_attention import AdditiveAttention, DotAttention
from tekso.models.pyramidal_encoder import PyramidalEncoder

RNG = np.random.default_rng(6)
ATTENTIONS: list[Any] = [
    AdditiveAttention.Params(),
    DotAttention.Params(),
    LocationAwareAttention.Params(num_filters=2, kernel_size=3),
]


def las(**changes: Any) -> Las:
    model: Las = Las.Params(
        vocab_size=5,
        front_end=LogMel.Params(sample_rate=8000, num_channels=8, fft_length=256, high_hz=3800.0),
        encoder=PyramidalEncoder.Params(num_pyramidal=1, cell=LstmCell.Params(hidden_dim=4)),
        embedding_dim=3,
        decoder=RecurrentDecoder.Params(
            num_layers=2, cell=LstmCell.Params(hidden_dim=6), output="state_and_context"
        ),
    ).set(changes).instantiate()  # fmt: skip
    return model


def batch() -> dict[str, Any]:
    return {
        "samples": tf.constant(RNG.normal(0, 0.1, (2, 1200)), tf.float32),
        "num_samples": tf.constant([1200, 700]),
        "labels": tf.constant([[1, 4, 0], [2, 0, 0]]),
        "num_labels": tf.constant([3, 1]),
    }


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_steps_of_a_search_give_the_loss_of_the_whole(attention: Any) -> None:
    model, ctx, given = las(**{"decoder.attention": attention}), StepContext(), batch()
    theta = model.init(seed=1)
    whole = model.fprop(theta, given, ctx).numpy()
    frames = model.encode(theta, given["samples"], ctx, lengths=given["num_samples"])
    assert frames.features.shape[1] > int(frames.lengths[1])
    source = {"encoded": frames.features, "source_segment_ids": tf.cast(frames.mask, tf.int32)}
    state = model.start_decoding(theta, source, 9, ctx)
    ids = tf.fill([2], model.end_id)
    for u in range(4):
        step = model.decode_step(theta, ids, state, u, ctx)
        nats = -tf.nn.log_softmax(step.logits).numpy()
        for row, own in enumerate([[1, 4, 0, 5], [2, 5]]):
            if u < len(own):
                assert whole[row, u] == pytest.approx(nats[row, own[u]], rel=1e-4)
        np.testing.assert_allclose(tf.reduce_sum(step.attention, 1), 1.0, rtol=1e-5)
        state = step.state
        ids = given["labels"][:, u] if u < 3 else ids


def test_location_aware_scores_equal_their_formula() -> None:
    layer: LocationAwareAttention = LocationAwareAttention.Params(
        query_dim=3, memory_dim=4, hidden_dim=5, num_filters=2, kernel_size=3
    ).instantiate()
    theta, ctx = layer.init(seed=2), StepContext()
    q, m = RNG.normal(0, 1, (1, 2, 3)), RNG.normal(0, 1, (1, 6, 4))
    last = RNG.dirichlet(np.ones(6), (1, 2))
    given = [tf.constant(x, tf.float32) for x in (q, m, last)]
    memory = layer.memory(theta, given[1], ctx)
    _, found = layer.attend(theta, given[0], ctx, memory=memory, previous=given[2])
    w = {name: value.numpy().astype(np.float64) for name, value in theta.items()}
    for k in range(2):
        scores = []
        for s in range(6):
            near = [last[0, k, j] if 0 <= j < 6 else 0.0 for j in (s - 1, s, s + 1)]
            location = np.array(near) @ w["w_filters"] @ w["w_location"]
            hidden = np.tanh(q[0, k] @ w["w_query"] + m[0, s] @ w["w_key"] + location)
            scores.append(np.exp(hidden @ w["w_score"]))
        np.testing.assert_allclose(found[0, k], scores / np.sum(scores), rtol=1e-4)
    with pytest.raises(ValueError, match="needs `previous`"):
        layer.attend(theta, given[0], ctx, memory=memory)
    with pytest.raises(ValueError, match="kernel_size is 4, must be odd"):
        LocationAwareAttention.Params(query_dim=3, memory_dim=4, kernel_size=4).instantiate()


def test_scheduled_sampling_feeds_drawn_tokens_in_training_only() -> None:
    given = batch()
    plain, sampled = las(), las(sampled_inputs=1.0)
    theta = tf.nest.map_structure(lambda w: 3.0 * w, plain.init(seed=1))

    def nats(model: Las, mode: Any = "train", step: int = 0) -> np.ndarray:
        ctx = StepContext(mode=mode, step=step, num_examples=2)
        return np.asarray(model.fprop(theta, given, ctx))

    gold = nats(plain)
    np.testing.assert_allclose(nats(sampled, "eval"), gold, rtol=1e-5)
    one, again, other = nats(sampled), nats(sampled), nats(sampled, step=1)
    np.testing.assert_allclose(one[:, 0], gold[:, 0], rtol=1e-5)  # the first input is the same
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - gold)[:, 1:].max() > 0.01 and np.abs(one - other)[:, 1:].max() > 0.01
    few = las(sampled_inputs=1e-9)
    np.testing.assert_allclose(nats(few), gold, rtol=1e-5)


def test_padding_of_the_vocabulary_has_no_effect() -> None:
    given, ctx = batch(), StepContext(mode="train", num_examples=2)
    plain, padded = (las(sampled_inputs=1.0, vocab_multiple=n) for n in (1, 4))
    theta = plain.init(seed=1)
    expected = plain.fprop(theta, given, ctx)
    zeros = {"table": [[0, 2], [0, 0]], "w": [[0, 2], [0, 0]], "b": [[0, 2]]}
    for name, weights in (("embedding", theta.embedding), ("softmax", theta.softmax)):
        theta[name] = Theta({key: tf.pad(w, zeros[key]) for key, w in weights.items()})
    assert theta.softmax.w.shape[0] == 8
    np.testing.assert_allclose(padded.fprop(theta, given, ctx), expected, rtol=1e-5)


def test_drawn_tokens_follow_the_model() -> None:
    model = las(sampled_inputs=1.0)
    theta = model.init(seed=1)
    theta.softmax["b"] = tf.constant([0.0, 9.0, 0.0, 0.0, 0.0, 0.0])  # nearly always token 1
    given = batch()
    ctx = StepContext(mode="train", num_examples=2)
    found = model.fprop(theta, given, ctx).numpy()
    ones = {**given, "labels": tf.ones([2, 3], tf.int32), "num_labels": tf.constant([3, 3])}
    fed = las().fprop(theta, ones, ctx).numpy()
    assert found[0, 2] != pytest.approx(las().fprop(theta, given, ctx).numpy()[0, 2], rel=1e-4)
    # Row 0 has the label 0 at place 2, whose input is the drawn token 1; as in `ones`.
    total = np.log(np.exp(-found[0, 2]) / np.exp(-fed[0, 2]))
    assert total == pytest.approx(-9.0, abs=1.0)


def test_the_pyramid_joins_pairs_of_frames_and_ignores_padding() -> None:
    encoder: PyramidalEncoder = PyramidalEncoder.Params(
        input_dim=3, num_pyramidal=2, cell=LstmCell.Params(hidden_dim=2)
    ).instantiate()
    theta, ctx = encoder.init(seed=3), StepContext()
    x = tf.constant(RNG.normal(0, 1, (2, 9, 3)), tf.float32)
    lengths = tf.constant([9, 5])
    found = encoder.fprop(theta, FrameSequence(x, lengths).with_features(x), ctx)
    assert found.features.shape == (2, 3, 4) and encoder.output_dim == 4
    assert found.lengths.numpy().tolist() == [3, 2] == encoder.num_frames(np.array([9, 5])).tolist()
    alone = encoder.fprop(theta, FrameSequence(x[1:, :5], lengths[1:]), ctx)
    np.testing.assert_allclose(found.features[1, :2], alone.features[0], atol=1e-6)
    assert encoder.reduction == 4
