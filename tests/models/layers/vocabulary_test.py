"""A padded table gives the numbers of the one that is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import flatten
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.softmax import Softmax

VOCAB, DIM = 11, 4
X = np.random.default_rng(1).normal(size=(2, 3, DIM)).astype(np.float32)
LABELS = np.array([[0, 10, 3], [5, 5, 1]], np.int32)
KINDS = {
    "embedding": lambda m: Embedding.Params(vocab_size=VOCAB, dim=DIM, vocab_multiple=m),
    "softmax": lambda m: Softmax.Params(vocab_size=VOCAB, input_dim=DIM, vocab_multiple=m),
    "biased": lambda m: Softmax.Params(
        vocab_size=VOCAB, input_dim=DIM, vocab_multiple=m, use_bias=True
    ),
}


def outputs(params: Any, smoothing: float) -> tuple[Any, Any, dict[str, Any]]:
    layer, ctx = params.instantiate(), StepContext(mode="train")
    theta = layer.init(3)
    with tf.GradientTape() as tape:
        tape.watch(flatten(theta))
        x, labels = tf.constant(X), tf.constant(LABELS)
        nats = layer.cross_entropy(theta, x, labels, ctx, label_smoothing=smoothing)
    gradients = tape.gradient(nats, flatten(theta))
    return nats.numpy(), layer.logits(theta, tf.constant(X), ctx).numpy(), gradients


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_number(kind: str, smoothing: float) -> None:
    nats, logits, gradients = outputs(KINDS[kind](1), smoothing)
    padded_nats, padded_logits, padded_gradients = outputs(KINDS[kind](8), smoothing)
    np.testing.assert_allclose(padded_nats, nats, rtol=1e-6)
    assert padded_logits.shape[-1] == 16
    np.testing.assert_allclose(padded_logits[..., :VOCAB], logits, rtol=1e-6)
    assert np.all(np.exp(padded_logits[..., VOCAB:]) == 0)
    for path, gradient in gradients.items():
        padded = tf.convert_to_tensor(padded_gradients[path]).numpy()
        np.testing.assert_allclose(padded[:VOCAB], gradient, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(padded[VOCAB:], 0)


def test_a_multiple_that_divides_adds_nothing() -> None:
    layer = Embedding.Params(vocab_size=12, dim=DIM, vocab_multiple=4).instantiate()
    assert layer.specs()["table"].shape == (12, DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_form_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="vocab_multiple is 0"):
        KINDS[kind](0).instantiate()
