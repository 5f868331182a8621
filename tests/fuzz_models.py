"""Builds the tasks and batches of `fuzz_executions.py` from choices: small models of many kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, Params, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, rows_of_stack
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.encoder_decoder import EncoderDecoder
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import RelativeBias, RotaryPositions
from tekso.models.layers.convolution import Conv2D, DepthwiseConv2D
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.expert_routing import SwitchRouter, TopKRouter
from tekso.models.layers.feed_forward import FeedForward, GatedFeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.normalization import BatchNorm, LayerNorm, RMSNorm
from tekso.models.layers.pooling import AveragePool, GlobalAveragePool, MaxPool
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import GruCell, LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.softmax import SampledSoftmax, Softmax
from tekso.models.layers.source_attention import DotAttention
from tekso.models.layers.stack import RepeatedStack, SharedStack, Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.lstm_encoder_decoder import LstmEncoderDecoder
from tekso.models.lstm_lm import LstmLm
from tekso.models.mlp import Mlp
from tekso.models.prefix_lm import PrefixLm
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.classification.task import Classification
from tekso.tasks.lm.task import LanguageModel
from tekso.tasks.mt.task import Translation

LENGTH, SOURCE_LENGTH, DIM, HEADS, CLASSES, FEATURES = 4, 6, 8, 4, 8, 6

Choices = Mapping[str, Any]


class ConvBlock(Layer):
    """Convolution, batch normalisation, ReLU, pooling and dropout; all but the first by choice."""

    class Params(Layer.Params):
        """Params of ConvBlock."""

        conv: Layer.Params = param("The convolution.", default=REQUIRED)
        norm: BatchNorm.Params | None = param("Normalisation; None: none.", default=None)
        pool: Layer.Params | None = param("Pooling; None: none.", default=None)
        dropout_rate: float = param("Dropout of the output.", default=0.0)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for name in ("conv", "norm", "pool"):
            if getattr(params, name) is not None:
                self.child(name, getattr(params, name))

    def fprop(self, theta: Theta, x: Any, ctx: Any) -> Any:
        x = self.conv.fprop(theta.conv, window_ops.constrain_image(ctx, x), ctx)
        if self.params.norm is not None:
            x = self.norm.fprop(theta.norm, x, ctx)
        x = ops.activate(ctx, "relu", x)
        if self.params.pool is not None:
            x = self.pool.fprop(Theta(), x, ctx)
        return ops.dropout(ctx, x, self.params.dropout_rate, self)


class Head(Layer):
    """Scores of the means of the channels."""

    class Params(Layer.Params):
        """Params of Head."""

        input_dim: int = param("Number of channels.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("pool", GlobalAveragePool.Params())
        self.child("linear", Linear.Params(input_dim=params.input_dim, output_dim=CLASSES))

    def fprop(self, theta: Theta, x: Any, ctx: Any) -> Any:
        return self.linear.fprop(theta.linear, self.pool.fprop(Theta(), x, ctx), ctx)


class Reused(Task):
    """A language model that computes its layers twice, with the same weights both times."""

    class Params(Task.Params):
        """Params of Reused."""

        stack: Layer.Params = param("A layer, or a repeated stack.", default=REQUIRED)
        vocab_size: int = param("Number of tokens.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        sizes = {"vocab_size": params.vocab_size, "dim": DIM}
        self.child("embedding", Embedding.Params(scale="sqrt_dim", **sizes))
        self.child("stack", params.stack)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def pieces(self) -> list[Piece]:
        tied = {"embedding": self.embedding}
        both = [piece for turn in range(2) for piece in self._turn(turn)]
        return [Piece("embed", tied, self._embed), *both, Piece("loss", tied, self._sum)]

    def _turn(self, turn: int) -> list[Piece]:
        name, own = f"stack{turn}", {"stack": self.stack}

        def run_rows(first: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
            x = self.stack.fprop(theta.stack, flow["x"], ctx.fold(turn), first=first)
            return {**flow, "x": x}

        def run(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": self.stack.fprop(theta.stack, flow["x"], ctx.fold(turn))}

        if isinstance(self.stack, RepeatedStack):
            return rows_of_stack(name, own, self.stack.params.num_layers, run_rows)
        return [Piece(name, own, run)]

    def _embed(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, "x": self.embedding.fprop(theta.embedding, flow["ids"], ctx)}

    def _sum(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        nats = self.embedding.cross_entropy(theta.embedding, flow["x"], flow["labels"], ctx)
        return {**flow, LOSS_SUM: tf.reduce_sum(nats * flow["weights"]), METRICS: {}}


# --- tasks ---


def task(choices: Choices) -> Params:
    """Returns the Params of the task that the choices describe."""
    return TASKS[choices["task"]](choices)


def _layer(c: Choices, *, causal: bool = True) -> Params:
    positions = {"rotary": RotaryPositions.Params, "relative": RelativeBias.Params}
    routers = {"switch": SwitchRouter.Params, "top2": TopKRouter.Params}
    feed_forwards: dict[str, Params] = {
        "plain": FeedForward.Params(hidden_dim=16),
        "gated": GatedFeedForward.Params(hidden_dim=16),
    }
    for name, router in routers.items():
        feed_forwards[name] = MixtureOfExperts.Params(num_experts=4, hidden_dim=16, router=router())
    attention = MultiHeadAttention.Params(
        num_heads=HEADS,
        num_kv_heads=c["kv_heads"],
        mask="causal" if causal else "none",
        positions=positions[c["positions"]]() if c["positions"] in positions else None,
        window=c["window"] if causal else None,
    )
    return TransformerLayer.Params(
        norm={"rms": RMSNorm, "layer": LayerNorm}[c["norm"]].Params(),
        norm_position=c["norm_position"],
        attention=attention,
        feed_forward=feed_forwards[c["feed_forward"]],
        dropout_rate=c["dropout"],
    )


def _stack(c: Choices, layer: Params) -> Params:
    if "remat" in c["stack"]:
        layer = Rematerialize.Params(layer=layer)
    kinds = {"repeated": RepeatedStack, "repeated_remat": RepeatedStack, "shared": SharedStack}
    kind = kinds.get(c["stack"], Stack)
    return kind.Params(num_layers=c["layers"], layer=layer)


def _softmax(c: Choices) -> Params | None:
    rows = {"vocab_multiple": c["vocab_multiple"]}
    return {
        "tied": lambda: None,
        "untied": lambda: Softmax.Params(use_bias=True, **rows),
        "sampled": lambda: SampledSoftmax.Params(num_samples=12, use_bias=True, **rows),
    }[c["softmax"]]()


def _embedding(c: Choices) -> Params:
    return Embedding.Params(scale="sqrt_dim", vocab_multiple=c["vocab_multiple"])


def _decoder_only(c: Choices, kind: Any, **sizes: int) -> Params:
    return kind.Params(
        dim=DIM,
        embedding=_embedding(c),
        positions=LearnedPositions.Params(max_length=LENGTH)
        if c["positions"] == "learned"
        else None,
        stack=_stack(c, _layer(c)),
        softmax=_softmax(c),
        dropout_rate=c["dropout"],
        **sizes,
    )


def _language_model(c: Choices) -> Params:
    model = _decoder_only(c, TransformerLm, vocab_size=c["vocab"])
    return LanguageModel.Params(model=model, label_smoothing=c["smoothing"])


def _prefix(c: Choices) -> Params:
    sizes = {"source_vocab_size": c["vocab"], "target_vocab_size": c["vocab"]}
    model = _decoder_only({**c, "positions": "rotary"}, PrefixLm, **sizes)
    return Translation.Params(model=model, label_smoothing=c["smoothing"])


def _translation(c: Choices) -> Params:
    memory = MultiHeadAttention.Params(num_heads=HEADS, num_kv_heads=c["kv_heads"])
    decoder = _layer(c).set(memory_attention=memory)
    model = EncoderDecoder.Params(
        source_vocab_size=c["vocab"],
        target_vocab_size=c["vocab"],
        dim=DIM,
        source_embedding=_embedding(c) if c["softmax"] == "untied" else None,
        target_embedding=_embedding(c),
        softmax=_softmax({**c, "softmax": "tied" if c["softmax"] == "sampled" else c["softmax"]}),
        encoder=_stack(c, _layer(c, causal=False)),
        decoder=_stack(c, decoder),
        dropout_rate=c["dropout"],
    )
    return Translation.Params(model=model, label_smoothing=c["smoothing"])


def _cell(c: Choices) -> Params:
    return {
        "lstm": LstmCell.Params(hidden_dim=DIM),
        "projected": LstmCell.Params(hidden_dim=16, projection_dim=DIM),
        "gru": GruCell.Params(hidden_dim=DIM),
        "gru_after": GruCell.Params(hidden_dim=DIM, reset="after"),
    }[c["cell"]]


def _recurrent(c: Choices) -> Params:
    stack = RecurrentStack.Params(
        num_layers=c["layers"], cell=_cell(c), dropout_rate=c["dropout"], residual=c["residual"]
    )
    softmax = _softmax(c) or Softmax.Params(vocab_multiple=c["vocab_multiple"])
    model = LstmLm.Params(
        vocab_size=c["vocab"],
        embedding_dim=DIM,
        embedding=_embedding(c),
        stack=stack,
        softmax=softmax,
        dropout_rate=c["dropout"],
    )
    return LanguageModel.Params(model=model, label_smoothing=c["smoothing"])


def _recurrent_pairs(c: Choices) -> Params:
    cell = LstmCell.Params(hidden_dim=DIM)
    decoder = RecurrentDecoder.Params(num_layers=2, cell=cell, dropout_rate=c["dropout"])
    if c["residual"] == "add":
        decoder = decoder.set(input_feeding="attentional", attention=DotAttention.Params())
    direction = "bidirectional_first"
    encoder = RecurrentStack.Params(num_layers=c["layers"], cell=cell, direction=direction)
    model = LstmEncoderDecoder.Params(
        source_vocab_size=c["vocab"],
        target_vocab_size=c["vocab"],
        dim=DIM,
        target_embedding=_embedding(c),
        softmax=_softmax({**c, "softmax": "tied" if c["softmax"] == "tied" else "untied"}),
        encoder=encoder,
        decoder=decoder,
        dropout_rate=c["dropout"],
    )
    return Translation.Params(model=model, label_smoothing=c["smoothing"])


def _reused(c: Choices) -> Params:
    layer = _layer(c).set(dim=DIM)
    repeated = RepeatedStack.Params(num_layers=c["layers"], layer=layer)
    stack = repeated if "repeated" in c["stack"] else layer
    return Reused.Params(vocab_size=c["vocab"], stack=stack)


def _images(c: Choices) -> Params:
    blocks, channels = [], 3
    for b in c["blocks"]:
        shape = {name: tuple(b[name]) for name in ("kernel_shape", "strides", "dilations")}
        shape["padding"] = b["padding"]
        if b["conv"] == "depthwise":
            conv = DepthwiseConv2D.Params(input_dim=channels, multiplier=b["channels"], **shape)
            channels *= b["channels"]
        else:
            groups = b["groups"] if channels % b["groups"] == 0 else 1
            sizes = {"input_dim": channels, "output_dim": b["channels"], "num_groups": groups}
            conv, channels = Conv2D.Params(**sizes, **shape), b["channels"]
        pool = _pool(b["pool"], b["pooling"]) if b["pool"] else None
        norm = BatchNorm.Params(dim=channels) if b["norm"] else None
        blocks.append(ConvBlock.Params(conv=conv, norm=norm, pool=pool, dropout_rate=c["dropout"]))
    layers = [*blocks, Head.Params(input_dim=channels)]
    stack = Stack.Params(num_layers=len(layers), layers=layers)
    return Classification.Params(num_classes=CLASSES, model=stack)


def _pool(kind: str, pooling: Choices) -> Params:
    shape = {name: tuple(pooling[name]) for name in ("window_shape", "strides")}
    return {"max": MaxPool, "average": AveragePool}[kind].Params(**shape)


def _features(c: Choices) -> Params:
    sizes = {"input_dim": FEATURES, "output_dim": CLASSES, "hidden_dims": [DIM] * c["layers"]}
    return Classification.Params(
        num_classes=CLASSES, model=Mlp.Params(dropout_rate=c["dropout"], **sizes)
    )


TASKS = {
    "language_model": _language_model,
    "prefix": _prefix,
    "translation": _translation,
    "recurrent": _recurrent,
    "recurrent_pairs": _recurrent_pairs,
    "reused": _reused,
    "images": _images,
    "features": _features,
}
"""{kind of task: its Params, given choices}."""

PAIRS = ("prefix", "translation", "recurrent_pairs")


# --- batches ---


def batch(choices: Choices, step: int) -> dict[str, np.ndarray]:
    """Returns the global batch of a step: unequal lengths or weights, some rows of padding."""
    rng, size = np.random.default_rng(step), choices["batch"]
    if choices["task"] in ("images", "features"):
        shape = (*choices["image"], 3) if choices["task"] == "images" else (FEATURES,)
        return {
            "x": rng.normal(size=(size, *shape)).astype(np.float32),
            "labels": rng.integers(0, CLASSES, size).astype(np.int32),
            "weights": rng.integers(0, 3, size).astype(np.float32) + 0.25,
        }
    if choices["task"] in PAIRS:
        source, _ = _tokens(rng, choices, SOURCE_LENGTH)
        target, tokens = _tokens(rng, choices, LENGTH)
        weights = (target["segment_ids"] > 0).astype(np.float32)
        return {
            **{f"source_{name}": array for name, array in source.items()},
            **{f"target_{name}": array for name, array in target.items()},
            "target_labels": tokens[:, 1:],
            "target_weights": weights,
        }
    found, tokens = _tokens(rng, choices, LENGTH)
    weights = (found["segment_ids"] > 0).astype(np.float32)
    if not choices["packed"]:
        found = {"ids": found["ids"]}
    return {**found, "labels": tokens[:, 1:], "weights": weights}


def _tokens(
    rng: np.random.Generator, choices: Choices, length: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns ids, segments and positions of rows, and the tokens; packed: two texts in a row."""
    size = choices["batch"]
    tokens = rng.integers(1, choices["vocab"], (size, length + 1)).astype(np.int32)
    first = rng.integers(2, length // 2 + 1, (size, 1))
    last = rng.integers(length // 2 + 1, length + 1, (size, 1))
    place = np.arange(length, dtype=np.int32)[None]
    is_second = (place >= first).astype(np.int32) * choices["packed"]
    found = {
        "ids": tokens[:, :-1],
        "segment_ids": ((1 + is_second) * (place < last)).astype(np.int32),
    }
    if choices["packed"]:
        found["positions"] = (place - is_second * first).astype(np.int32)
    return found, tokens
