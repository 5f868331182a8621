"""Rows of a batch, seen by a model: how pairs are laid out does not change their loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.encoder_decoder import EncoderDecoder, decoder_layer
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.pairs import InMemoryPairs
from tekso.tasks.mt.task import Translation


def task_of(input: Any) -> Translation:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=12),
    )
    model = EncoderDecoder.Params(
        dim=8,
        target_embedding=Embedding.Params(scale="sqrt_dim"),
        encoder=Stack.Params(num_layers=1, layer=layer),
        decoder=Stack.Params(num_layers=1, layer=decoder_layer(layer)),
    )
    task: Translation = Translation.complete(Translation.Params(model=model), input).instantiate()
    return task


def test_all_forms_of_batches_have_the_same_loss() -> None:
    random = np.random.default_rng(0)
    pairs = [
        ("".join(random.choice(list("abcd"), random.integers(1, 14))),
         "".join(random.choice(list("wxyz"), random.integers(1, 12))), language)
        for language in ["de"] * 12 + ["fr"] * 5
    ]  # fmt: skip
    corpus = InMemoryPairs.Params(train=pairs, languages=["de", "fr"])
    losses: dict[str, float] = {}
    theta = None
    for form in (PaddedPairs, BucketedPairs, PackedPairs):
        one = form.Params(
            corpus=corpus, order="once", batch_size=4, source_length=24, target_length=20
        ).instantiate()
        task = task_of(one)
        theta = theta or task.init(1)
        loss_sum = weight = 0.0
        for step in range(one.num_batches):
            batch = {key: tf.constant(value) for key, value in one.batch(step).items()}
            ctx = StepContext(mode="eval", seed=1)
            loss_sum += float(task.loss(theta, batch, ctx).loss_sum)
            weight += float(task.loss_weight(batch))
        assert weight == sum(len(target) + 1 for _, target, _ in pairs)
        losses[form.__name__] = loss_sum
    for loss in losses.values():
        np.testing.assert_allclose(loss, losses["PaddedPairs"], rtol=1e-5)
