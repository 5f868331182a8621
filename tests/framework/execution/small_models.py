"""Small models that could tell one execution from another: dropout, padding, auxiliary losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import recurrent_pairs
import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.params import Params, param
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import Theta
from tekso.models.encoder_decoder import EncoderDecoder
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import RelativeBias, RotaryPositions
from tekso.models.layers.convolution import Conv2D, DepthwiseConv2D
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.expert_routing import SwitchRouter, TopKRouter
from tekso.models.layers.feed_forward import FeedForward, GatedFeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.lora import Lora
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.normalization import BatchNorm, RMSNorm
from tekso.models.layers.pooling import AveragePool, GlobalAveragePool, MaxPool
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import GruCell, LstmCell
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.softmax import SampledSoftmax, Softmax
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.lstm_lm import LstmLm
from tekso.models.prefix_lm import PrefixLm
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.task import LanguageModel
from tekso.tasks.mt.task import Translation

BATCH, LENGTH, VOCAB, DIM, HEADS, MLP = 8, 8, 32, 16, 4, 32
SOURCE_LENGTH = 12
SIDE, CLASSES = 16, 8


def layer(**changes: Any) -> Params:
    """A layer with dropout after each part: a third of a small program is dropout already."""
    params = TransformerLayer.Params(
        norm=RMSNorm.Params(),
        attention=MultiHeadAttention.Params(
            num_heads=HEADS, mask="causal", positions=RotaryPositions.Params()
        ),
        feed_forward=FeedForward.Params(hidden_dim=MLP),
        dropout_rate=0.1,
    )
    return params.set(changes)


def noisy_layer() -> Params:
    """A layer with dropout of all kinds."""
    return layer(**{"attention.dropout_rate": 0.1, "feed_forward.dropout_rate": 0.1})


class Block(FeedForward):
    """x + feed_forward(x): for tests of what an execution does with any layer.

    Attention takes most of the time of a trace.
    """

    class Params(FeedForward.Params):
        """Params of Block."""

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: Any, *, mask: Any = None, positions: Any = None
    ) -> tf.Tensor:
        return x + super().fprop(theta, x, ctx)


def block() -> Params:
    return Block.Params(input_dim=DIM, hidden_dim=MLP, dropout_rate=0.1)


def language_model(stack: Params, **changes: Any) -> Params:
    model = TransformerLm.Params(vocab_size=VOCAB, dim=DIM, dropout_rate=0.1, stack=stack)
    return LanguageModel.Params(model=model.set(changes))


def experts(router: Params, **changes: Any) -> Params:
    return MixtureOfExperts.Params(num_experts=4, hidden_dim=MLP, router=router, **changes)


def lstm(cell: Params, **changes: Any) -> Params:
    stack = RecurrentStack.Params(num_layers=2, cell=cell, dropout_rate=0.1)
    model = LstmLm.Params(vocab_size=VOCAB, embedding_dim=DIM, stack=stack)
    return LanguageModel.Params(model=model.set(changes))


def encoder_decoder(kind: Any = Stack, layers: int = 1, **changes: Any) -> Params:
    encoder = layer(attention=MultiHeadAttention.Params(num_heads=HEADS))
    memory_attention = MultiHeadAttention.Params(num_heads=HEADS, dropout_rate=0.1)
    model = EncoderDecoder.Params(
        source_vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        dim=DIM,
        dropout_rate=0.1,
        encoder=kind.Params(num_layers=layers, layer=encoder),
        decoder=kind.Params(num_layers=layers, layer=layer(memory_attention=memory_attention)),
    )
    return Translation.Params(model=model.set(changes), label_smoothing=0.1)


def prefix_lm() -> Params:
    model = PrefixLm.Params(
        source_vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        dim=DIM,
        dropout_rate=0.1,
        stack=Stack.Params(num_layers=1, layer=layer()),
    )
    return Translation.Params(model=model)


def adapted() -> Params:
    """A repeated stack whose projections have adapters, and a tied table with one."""
    stack = RepeatedStack.Params(num_layers=2, layer=layer(dropout_rate=0.0))
    lora = Lora.Params(rank=2, alpha=16.0, dropout_rate=0.1)
    adapters = {"*.adapter": lora, "*.table_adapter": lora.copy()}
    params = language_model(stack, dropout_rate=0.0).set(adapters)
    return params.set({"*.attention.adapter.only": ["q", "out"]})


def adapted_experts() -> Params:
    """Experts, a table of tokens and the softmax have adapters."""
    lora = Lora.Params(rank=2, alpha=16.0, dropout_rate=0.1)
    stack = Stack.Params(num_layers=1, layer=layer(feed_forward=experts(TopKRouter.Params())))
    params = language_model(stack, dropout_rate=0.0, softmax=Softmax.Params(use_bias=True))
    return params.set({"*.table_adapter": lora, "*.expert_adapter": lora})


_ALL_BUT_ADAPTERS = ["(?!.*_lora_[ab]$).*"]
FROZEN = dict.fromkeys(("adapted", "adapted_experts", "adapted_images"), _ALL_BUT_ADAPTERS)
"""Patterns of frozen weights by model."""

PAIRED = ("translation", "repeated_translation", "untied_translation", "prefix")
"""Models of pairs; the second is given packed rows."""


class ImageTask(Task):
    """Classifies small images: every kind of windowed layer, and batch statistics."""

    class Params(Task.Params):
        """Params of ImageTask."""

        kernel_adapter: Lora.Params | None = param("Of the convolutions.", default=None)
        noise: float = param("Standard deviation of noise on activations.", default=0.0)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        lora = self.params.kernel_adapter
        self.child("first", Conv2D.Params(input_dim=3, output_dim=8, kernel_adapter=lora))
        self.child("norm", BatchNorm.Params(dim=8))
        self.child("maximum", MaxPool.Params())
        self.child("depthwise", DepthwiseConv2D.Params(input_dim=8, activation="relu"))
        second = Conv2D.Params(input_dim=8, output_dim=16, strides=(2, 2), kernel_adapter=lora)
        self.child("second", second)
        self.child("average", AveragePool.Params(window_shape=(2, 2), strides=(1, 1)))
        self.child("all", GlobalAveragePool.Params())
        self.child("classifier", Linear.Params(input_dim=16, output_dim=CLASSES))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Theta, batch: Any, ctx: Any) -> LossSums:
        x = window_ops.constrain_image(ctx, batch["images"])
        x = self.first.fprop(theta["first"], x, ctx)
        x = ops.activate(ctx, "relu", self.norm.fprop(theta.norm, x, ctx))
        x = ops.dropout(ctx, self.maximum.fprop(Theta(), x, ctx), 0.2, self)
        if self.params.noise:
            x += self.params.noise * ctx.normal(self, x.shape, "noise")
        x = self.depthwise.fprop(theta.depthwise, x, ctx)
        x = ops.activate(ctx, "relu", self.second.fprop(theta.second, x, ctx))
        x = self.average.fprop(Theta(), x, ctx)
        x = self.all.fprop(Theta(), x, ctx)
        logits = self.classifier.fprop(theta.classifier, x, ctx)
        target = tf.one_hot(batch["labels"], CLASSES)
        nats = tf.reduce_logsumexp(logits, -1) - tf.reduce_sum(logits * target, -1)
        return LossSums(tf.reduce_sum(nats * batch["weights"]))


MODELS = {
    "dense": lambda: language_model(Stack.Params(num_layers=1, layer=noisy_layer())),
    "blocks": lambda: language_model(Stack.Params(num_layers=2, layer=block())),
    "blocks_remat": lambda: language_model(
        RepeatedStack.Params(num_layers=3, layer=Rematerialize.Params(layer=block()))
    ),
    "remat": lambda: language_model(
        Stack.Params(num_layers=2, layer=Rematerialize.Params(layer=layer()))
    ),
    "repeated": lambda: language_model(RepeatedStack.Params(num_layers=3, layer=layer())),
    "repeated_remat": lambda: language_model(
        RepeatedStack.Params(num_layers=3, layer=Rematerialize.Params(layer=noisy_layer()))
    ),
    "adapted": adapted,
    "adapted_experts": adapted_experts,
    "adapted_images": lambda: ImageTask.Params(
        kernel_adapter=Lora.Params(rank=2, alpha=16.0, dropout_rate=0.1), noise=0.1
    ),
    "untied": lambda: language_model(
        Stack.Params(num_layers=1, layer=layer()),
        softmax=Softmax.Params(use_bias=True),
        positions=LearnedPositions.Params(max_length=LENGTH),
    ),
    "gated": lambda: language_model(
        Stack.Params(
            num_layers=1,
            layer=layer(
                norm_position="post",
                feed_forward=GatedFeedForward.Params(hidden_dim=MLP),
                attention=MultiHeadAttention.Params(
                    num_heads=HEADS, num_kv_heads=2, mask="causal", positions=RelativeBias.Params()
                ),
            ),
        )
    ),
    "sampled": lambda: language_model(
        Stack.Params(num_layers=1, layer=layer()), softmax=SampledSoftmax.Params(num_samples=12)
    ),
    "moe": lambda: language_model(
        Stack.Params(num_layers=1, layer=layer(feed_forward=experts(SwitchRouter.Params())))
    ),
    "moe2": lambda: language_model(
        Stack.Params(num_layers=1, layer=layer(feed_forward=experts(TopKRouter.Params())))
    ),
    "lstm": lambda: lstm(LstmCell.Params(hidden_dim=MLP)),
    "gru": lambda: lstm(GruCell.Params(hidden_dim=DIM)),
    **recurrent_pairs.MODELS,
    "images": lambda: ImageTask.Params(),
    "translation": encoder_decoder,
    "repeated_translation": lambda: encoder_decoder(RepeatedStack, layers=2),
    "untied_translation": lambda: encoder_decoder(
        source_embedding=Embedding.Params(), softmax=Softmax.Params()
    ),
    "prefix": prefix_lm,
}


def batch(model: str, step: int, *, size: int = BATCH) -> dict[str, np.ndarray]:
    if model in recurrent_pairs.MODELS:
        return recurrent_pairs.batch(step, size)
    rng = np.random.default_rng(step)
    if "images" in model:
        return {
            "x" if model == "stacked_images" else "images": rng.normal(
                size=(size, SIDE, SIDE, 3)
            ).astype(np.float32),
            "labels": rng.integers(0, CLASSES, size).astype(np.int32),
            "weights": rng.integers(0, 2, size).astype(np.float32) + 0.5,
        }
    if model in PAIRED:
        return pairs(rng, size, packed=model == "repeated_translation")
    tokens = rng.integers(0, VOCAB, (size, LENGTH + 1)).astype(np.int32)
    lengths = rng.integers(2, LENGTH + 1, size)
    return {
        "ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "weights": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
    }


def pairs(rng: np.random.Generator, size: int, *, packed: bool) -> dict[str, np.ndarray]:
    """Sources and targets of several lengths; where they are packed, two pairs a row."""
    found = {}
    for side, length in (("source", SOURCE_LENGTH), ("target", LENGTH)):
        tokens = rng.integers(0, VOCAB, (size, length + 1)).astype(np.int32)
        first = rng.integers(2, length // 2 + 1, (size, 1))
        last = rng.integers(length // 2 + 1, length + 1, (size, 1))
        place = np.arange(length, dtype=np.int32)[None]
        is_second = (place >= first).astype(np.int32) * packed
        found[f"{side}_ids"] = tokens[:, :-1]
        found[f"{side}_segment_ids"] = ((1 + is_second) * (place < last)).astype(np.int32)
        if side == "target":
            found["target_labels"] = tokens[:, 1:]
            found["target_weights"] = (place < last).astype(np.float32)
        if packed:
            found[f"{side}_positions"] = (place - is_second * first).astype(np.int32)
    return found
