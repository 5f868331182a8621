"""TextClassifier: padding has no effect, and an encoder-decoder has its encoder's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.encoder_decoder import EncoderDecoder
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.text_classifier import TextClassifier

D = 8
LAYER = TransformerLayer.Params(
    attention=MultiHeadAttention.Params(num_heads=2), feed_forward=FeedForward.Params(hidden_dim=6)
)


def classifier() -> Any:
    stack = Stack.Params(num_layers=2, layer=LAYER)
    return TextClassifier.Params(vocab_size=11, output_dim=3, dim=D, encoder=stack).instantiate()


def test_padding_changes_no_score_and_tokens_do() -> None:
    model = classifier()
    theta = model.init(1)
    x = np.array([[3, 4, 5, 0], [6, 7, 0, 0]], np.int32)
    short = model.fprop(theta, tf.constant(x[:, :3]), StepContext())
    long = model.fprop(theta, tf.constant(np.pad(x, [(0, 0), (0, 3)])), StepContext())
    assert short.shape == (2, 3)
    np.testing.assert_allclose(long, short, rtol=1e-4, atol=1e-5)
    other = model.fprop(theta, tf.constant(x[:, [1, 0, 2]]), StepContext())
    assert np.abs(other - short).max() > 1e-3


def test_its_encoder_has_the_weights_of_an_encoder_decoder() -> None:
    own = {p: s.shape for p, s in classifier().specs().items()}
    decoder = LAYER.copy().set(
        {"attention.mask": "causal", "memory_attention": MultiHeadAttention.Params(num_heads=2)}
    )
    both = EncoderDecoder.Params(
        source_vocab_size=11,
        target_vocab_size=11,
        dim=D,
        encoder=Stack.Params(num_layers=2, layer=LAYER),
        decoder=Stack.Params(num_layers=1, layer=decoder),
    ).instantiate()
    other = {p: s.shape for p, s in both.specs().items()}
    for part, name in (("embedding", "target_embedding"), ("encoder", "encoder")):
        mine = {p.removeprefix(f"{part}/"): s for p, s in own.items() if p.startswith(f"{part}/")}
        theirs = {
            p.removeprefix(f"{name}/"): s for p, s in other.items() if p.startswith(f"{name}/")
        }
        assert mine == theirs
