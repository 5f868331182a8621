"""The language-model task: sums, weights, parts of a batch, packing, what is filled in."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, Configurable, param
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.task import LanguageModel

VOCAB = 11


def task_params(vocab_size: Any = VOCAB, **more: Any) -> LanguageModel.Params:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(mask="causal", num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=10),
    )
    model = TransformerLm.Params(dim=8, stack=Stack.Params(num_layers=2, layer=layer))
    if vocab_size is not None:
        model.vocab_size = vocab_size
    return LanguageModel.Params(model=model, **more)


def batch_of(seed: int, rows: int = 4, length: int = 5) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, [rows, length + 1]).astype(np.int32)
    weights = np.ones([rows, length], np.float32)
    weights[1, 3:] = 0
    weights[-1] = 0  # a row that fills up the last batch of a pass
    return {
        "ids": tf.constant(ids[:, :-1]),
        "labels": tf.constant(ids[:, 1:]),
        "weights": tf.constant(weights),
        "num_bytes": tf.constant(2 * weights.sum(1)),
    }


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_loss_is_the_weighted_sum_of_nats_and_bits_per_byte_follow() -> None:
    task = task_params().instantiate()
    theta, batch = task.init(3), batch_of(0)
    sums = task.loss(theta, batch, StepContext())
    logits = task.model.logits(theta.model, batch["ids"], StepContext()).numpy()
    log_probs = np.take_along_axis(
        log_softmax(logits), batch["labels"].numpy()[..., None], -1
    ).squeeze(-1)
    weights = batch["weights"].numpy()
    want = -(log_probs * weights).sum()
    np.testing.assert_allclose(sums.loss_sum, want, rtol=1e-5)
    assert task.loss_weight(batch) == weights.sum() == 13

    pairs = {"loss": (float(sums.loss_sum), 13.0)}
    pairs |= {name: (float(v), float(w)) for name, (v, w) in sums.metrics.items()}
    figures = task.summarize(pairs)
    assert figures["loss"] == pytest.approx(want / 13, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(want / 13), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(want / math.log(2) / 26, rel=1e-5)


class Smoothed(Layer):
    """The mean of three neighbours, of which the last one is `shift` tokens later."""

    class Params(Layer.Params):
        dim: int = param("Size of the last dim.", default=REQUIRED)
        shift: int = param("Tokens after an element that its output depends on.", default=0)

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        after, length = self.params.shift, x.shape[1]
        padded = tf.pad(x, [[0, 0], [2 - after, after], [0, 0]])
        return x + tf.add_n([padded[:, i : i + length] for i in range(3)]) / 3


@pytest.mark.parametrize("shift", [0, 1])
def test_equal_losses_differ_only_if_a_custom_layer_is_not_causal(shift: int) -> None:
    params = task_params()
    stack = Stack.Params(num_layers=2, layer=Smoothed.Params(dim=8, shift=shift))
    task = params.set({"model.stack": stack}).instantiate()
    example = {name: array.numpy()[:1] for name, array in batch_of(0, length=6).items()}
    one, other, problem = task.equal_losses(example)
    assert (one["ids"] != other["ids"]).sum() == 3 and other["ids"].max() < VOCAB
    theta = task.init(3)
    losses = [float(task.loss(theta, batch, StepContext()).loss_sum) for batch in (one, other)]
    if shift:
        assert abs(losses[0] - losses[1]) > 0.01 * losses[0]
        assert "Smoothed (model/stack/layers/1)" in problem
    else:
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_models_without_custom_layers_are_not_tried() -> None:
    example = {name: array.numpy()[:1] for name, array in batch_of(0).items()}
    assert task_params().instantiate().equal_losses(example) is None


def test_log_probs_are_the_negative_cross_entropy() -> None:
    task = task_params().instantiate()
    theta, batch = task.init(3), batch_of(0)
    log_probs = task.log_probs(theta, batch["ids"], batch["labels"], StepContext(mode="decode"))
    loss_sum = task.loss(theta, batch, StepContext()).loss_sum
    np.testing.assert_allclose(-tf.reduce_sum(log_probs * batch["weights"]), loss_sum, rtol=1e-5)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    task = task_params().instantiate()
    theta, batch = task.init(3), batch_of(1)
    whole = task.loss(theta, batch, StepContext())
    halves = [{name: x[start : start + 2] for name, x in batch.items()} for start in (0, 2)]
    parts = [task.loss(theta, half, StepContext()) for half in halves]
    np.testing.assert_allclose(sum(p.loss_sum for p in parts), whole.loss_sum, rtol=1e-5)
    assert sum(task.loss_weight(half) for half in halves) == task.loss_weight(batch)
    for name, (value, weight) in whole.metrics.items():
        np.testing.assert_allclose(sum(p.metrics[name][0] for p in parts), value, rtol=1e-5)
        np.testing.assert_allclose(sum(p.metrics[name][1] for p in parts), weight)


def test_packed_rows_equal_their_texts_alone() -> None:
    task = task_params().instantiate()
    theta = task.init(3)
    a, b = batch_of(5, rows=2, length=3), batch_of(6, rows=2, length=4)
    rows = [{name: x[:1] for name, x in part.items()} for part in (a, b)]
    packed = {
        name: tf.concat([rows[0][name], rows[1][name], tf.zeros_like(rows[0][name][:, :1])], 1)
        for name in ("ids", "labels", "weights")
    }
    packed["num_bytes"] = rows[0]["num_bytes"] + rows[1]["num_bytes"]
    packed["segment_ids"] = tf.constant([[1, 1, 1, 2, 2, 2, 2, 0]])
    packed["positions"] = tf.constant([[0, 1, 2, 0, 1, 2, 3, 0]])
    alone = sum(task.loss(theta, row, StepContext()).loss_sum for row in rows)
    together = task.loss(theta, packed, StepContext())
    np.testing.assert_allclose(together.loss_sum, alone, rtol=1e-5)


def test_label_smoothing_acts_in_training_only() -> None:
    plain = task_params().instantiate()
    smooth = task_params(label_smoothing=0.3).instantiate()
    theta, batch = plain.init(3), batch_of(0)
    train, evaluate = StepContext(mode="train"), StepContext()
    assert smooth.loss(theta, batch, evaluate).loss_sum == plain.loss(theta, batch, train).loss_sum

    logits = plain.model.logits(theta.model, batch["ids"], evaluate).numpy()
    log_probs = log_softmax(logits)
    target = 0.7 * np.eye(VOCAB)[batch["labels"].numpy()] + 0.3 / VOCAB
    want = -(target * log_probs).sum(-1) * batch["weights"].numpy()
    sums = smooth.loss(theta, batch, train)
    np.testing.assert_allclose(sums.loss_sum, want.sum(), rtol=1e-5)
    assert sums.metrics == {}  # a smoothed loss has no bits per byte,
    assert "perplexity" not in smooth.summarize({"loss": (3.0, 2.0)})  # nor a perplexity
    assert "perplexity" in smooth.summarize({"loss": (3.0, 2.0), "bits_per_byte": (1.0, 2.0)})


def test_metrics_without_weight_are_left_out() -> None:
    task = task_params().instantiate()
    assert task.summarize({"loss": (3.0, 2.0), "bits_per_byte": (0.0, 0.0)}) == {
        "loss": 1.5,
        "perplexity": math.exp(1.5),
    }
    assert math.isfinite(task.summarize({"loss": (1e9, 1.0)})["perplexity"])


class Tokens(Configurable):
    """Stands for an input with a tokenizer."""


class Windows(Tokens):
    """Stands for one whose sequences have a length."""

    class Params(Tokens.Params):
        """Params of Windows."""

        length: int = param("Tokens in a sequence.", default=REQUIRED)


def input_of(vocab_size: int | None, *, length: int | None = None) -> Any:
    params = Tokens.Params() if length is None else Windows.Params(length=length)
    return SimpleNamespace(vocab_size=vocab_size, params=params)


def test_what_is_open_comes_from_the_input() -> None:
    params = task_params(vocab_size=None)
    done = LanguageModel.complete(params, input_of(37, length=50))
    assert done.model.vocab_size == 37
    assert done.decode.window == 50
    assert params.model.vocab_size is REQUIRED  # the original is left alone
    assert done.instantiate().specs()["model/embedding/table"].shape == (37, 8)


def test_learned_positions_are_as_many_as_the_input_is_long() -> None:
    params = task_params().set({"model.positions": LearnedPositions.Params()})
    done = LanguageModel.complete(params, input_of(11, length=50))
    assert done.model.positions.max_length == 50
    done.decode.window = 51
    with pytest.raises(ValueError, match=r"task\.decode\.window is 51, but .* 50 positions"):
        done.instantiate()


def test_without_a_decoder_nothing_is_decoded() -> None:
    params = task_params(vocab_size=REQUIRED).set_text("decode", "None")
    done = LanguageModel.complete(params, input_of(32, length=50))
    assert done.decode is None
    task = done.instantiate()
    assert task.decode(program=None, input=None) is None


def test_what_is_set_stays() -> None:
    params = task_params(vocab_size=64).set({"decode.window": 9})
    done = LanguageModel.complete(params, input_of(37, length=50))
    assert (done.model.vocab_size, done.decode.window) == (64, 9)


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.model\.vocab_size is 11, but .* 37 tokens"):
        LanguageModel.complete(task_params(), input_of(37))


def test_a_vocabulary_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.model\.vocab_size is not set: training takes"):
        LanguageModel.complete(task_params(vocab_size=None), input_of(None))


def test_impossible_label_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.label_smoothing is 1\.0"):
        task_params(label_smoothing=1.0).instantiate()
