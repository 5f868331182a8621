"""The translation task: sums, weights, pieces, what is filled in."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.params import REQUIRED
from tekso.framework.pieces import LOSS_SUM, METRICS
from tekso.models.encoder_decoder import DECODER_LAYER, ENCODER_LAYER, EncoderDecoder
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.stack import Stack
from tekso.models.prefix_lm import PrefixLm
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.pairs import InMemoryPairs
from tekso.tasks.mt.task import Translation

VOCAB = 11


def task_params(vocab_size: Any = VOCAB, **more: Any) -> Translation.Params:
    model = EncoderDecoder.Params(
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        dim=8,
        encoder=Stack.Params(num_layers=1, layer=ENCODER_LAYER),
        decoder=Stack.Params(num_layers=1, layer=DECODER_LAYER),
    )
    model.set({"*num_heads": 2, "*hidden_dim": 10})
    return Translation.Params(model=model, **more)


def batch_of(seed: int = 0) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(seed)
    source, target = (rng.integers(0, VOCAB, [4, n]).astype(np.int32) for n in (7, 6))
    weights = np.ones([4, 5], np.float32)
    weights[1, 3:] = 0
    weights[-1] = 0  # a row that fills up the last batch of a pass
    found = {
        "source_ids": source,
        "source_segment_ids": np.ones_like(source) * (weights.max(1) > 0)[:, None].astype(np.int32),
        "target_ids": target[:, :-1],
        "target_labels": target[:, 1:],
        "target_weights": weights,
        "target_segment_ids": weights.astype(np.int32),
    }
    return {name: tf.constant(value) for name, value in found.items()}


def log_probs_of(task: Translation, theta: Any, batch: Any) -> np.ndarray:
    logits = task.model.logits(theta.model, batch, StepContext()).numpy().astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(log_probs, batch["target_labels"].numpy()[..., None], -1)[..., 0]


def test_loss_is_the_weighted_sum_of_nats_and_perplexity_follows() -> None:
    task = task_params().instantiate()
    theta, batch = task.init(3), batch_of()

    sums = task.loss(theta, batch, StepContext())
    loss_sum = float(sums.loss_sum)

    log_probs = log_probs_of(task, theta, batch)
    want = -(log_probs * batch["target_weights"].numpy()).sum()
    assert loss_sum == pytest.approx(want, rel=1e-5)
    np.testing.assert_allclose(task.log_probs(theta, batch, StepContext()), log_probs, rtol=1e-4)
    assert task.loss_weight(batch) == 13
    assert task.count({k: v.numpy() for k, v in batch.items()}) == (13, "tokens")
    metrics = {name: (float(s), float(w)) for name, (s, w) in sums.metrics.items()}
    figures = task.summarize({"loss": (loss_sum, 13.0), **metrics})
    assert figures == pytest.approx({"loss": want / 13, "perplexity": math.exp(want / 13)})


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pieces_give_the_loss_and_labels_are_smoothed_in_training_only(mode: Any) -> None:
    task = task_params(label_smoothing=0.2).instantiate()
    theta, batch, ctx = task.init(3), batch_of(), StepContext(mode=mode)

    sums = task.loss(theta, batch, ctx)
    loss_sum = sums.loss_sum

    flow: Any = dict(batch)
    for piece in task.pieces():
        flow = piece.run(theta, flow, ctx)
    np.testing.assert_allclose(flow[LOSS_SUM], loss_sum, rtol=1e-6)
    assert flow[METRICS].keys() == sums.metrics.keys()
    plain = -(log_probs_of(task, theta, batch) * batch["target_weights"].numpy()).sum()
    assert (abs(float(loss_sum) - plain) < 1e-3) == (mode == "eval")
    figures = task.summarize({"loss": (1.0, 1.0), **sums.metrics})
    assert ("perplexity" in figures) == (mode == "eval")  # of smoothed labels there is none


def test_targets_are_no_longer_than_the_positions_that_are_learned() -> None:
    params = task_params()
    params.model.target_positions = LearnedPositions.Params(max_length=6)
    input = types.SimpleNamespace(params=PackedPairs.Params(source_length=9, target_length=8))

    task = Translation.complete(params, input).instantiate()

    assert task.params.translator.search.max_length == 6
    theta, batch = task.init(0), batch_of()
    task.model.start_decoding(theta.model, batch, 6, StepContext())
    with pytest.raises(ValueError, match=r"position 6 is needed, but only 6.*search.max_length"):
        task.model.start_decoding(theta.model, batch, 7, StepContext())


@pytest.mark.parametrize("learned", [REQUIRED, 19])
def test_learned_positions_of_one_sequence_have_room_for_source_and_target(learned: Any) -> None:
    input = PackedPairs.Params(source_length=9, target_length=8)
    params = one_sequence(learned)

    task = Translation.complete(params, types.SimpleNamespace(params=input)).instantiate()

    both = 17 if learned is REQUIRED else 19
    assert task.params.model.positions.max_length == both
    assert task.params.translator.search.max_length == both - 9
    batch = {name: tf.ones([2, 9], tf.int32) for name in ("source_ids", "source_segment_ids")}
    search = task.params.translator.search.instantiate()
    found = search.search(task.model, task.init(0).model, batch, StepContext(mode="decode"), 0)
    assert found["ids"].shape == (2, 1, both - 9)


def test_learned_positions_of_one_sequence_follow_the_longest_source() -> None:
    input = types.SimpleNamespace(params=PackedPairs.Params(source_length=9, target_length=8))
    params = one_sequence(19)
    params.translator.max_source_length = 12
    assert Translation.complete(params, input).translator.search.max_length == 7
    with pytest.raises(ValueError, match=r"max_length is 9, but sources alone have up to 9"):
        Translation.complete(one_sequence(9), input)


def one_sequence(learned: Any) -> Translation.Params:
    model = PrefixLm.Params(source_vocab_size=VOCAB, target_vocab_size=VOCAB, dim=8)
    model.set({"*num_heads": 2, "*hidden_dim": 10, "stack.num_layers": 1})
    model.positions = LearnedPositions.Params(max_length=learned)
    return Translation.Params(model=model)


def test_vocabularies_and_learned_positions_are_those_of_the_input() -> None:
    params = task_params(REQUIRED)
    params.model.source_positions = LearnedPositions.Params()
    input_params = PackedPairs.Params(source_length=9, target_length=8)
    read = types.SimpleNamespace(params=input_params, source_vocab_size=12, target_vocab_size=12)

    model = Translation.complete(params, read).model

    assert (model.source_vocab_size, model.target_vocab_size) == (12, 12)
    assert model.source_positions.max_length == 9
    assert params.model.source_vocab_size is REQUIRED
    input_params.corpus = InMemoryPairs.Params(languages=["de", "fr"])
    unread = types.SimpleNamespace(params=input_params, vocab_size=20)
    assert Translation.complete(params, unread).model.target_vocab_size == 22


def test_vocabularies_that_are_open_or_too_small_are_refused() -> None:
    apart = SentencePiece.Params()
    input_params = PackedPairs.Params(source_tokenizer=apart, target_tokenizer=apart)
    unread = types.SimpleNamespace(params=input_params, vocab_size=20)
    with pytest.raises(ValueError, match=r"task\.model\.source_vocab_size is not set"):
        Translation.complete(task_params(REQUIRED), unread)
    read = types.SimpleNamespace(params=input_params, source_vocab_size=11, target_vocab_size=12)
    with pytest.raises(ValueError, match=r"target_vocab_size is 11, but the input has 12"):
        Translation.complete(task_params(), read)
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.0"):
        task_params(label_smoothing=1.0).instantiate()
