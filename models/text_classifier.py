"""TextClassifier: the encoder of an EncoderDecoder that classifies a text.

    ids ─ embedding + positions ─ dropout ─ encoder ─ norm ─ mean over tokens ─ linear

Legend: B batch, T length, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.encoder_decoder import ENCODER_LAYER
from tekso.models.layers import masking
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.pooling import mean_over_tokens
from tekso.models.layers.positions import PositionsBase, SinusoidalPositions
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.stack import Stack, StackBase, pieces_of_stack


class TextClassifier(Layer):
    """Scores of classes from the mean of the encoded tokens; id 0 is padding.

    Embedding, encoder and norm have the weights of an EncoderDecoder of the same sizes, so that a
    MultiTask can share them with `target_embedding`, `encoder` and `encoder_norm` there.

    Shapes:
      x: [B, T] int
      returns: [B, output_dim], float32 or wider
    Children:
      embedding, positions, encoder, encoder_norm
      classifier: Linear, dims ("embed", "classes")
    """

    class Params(Layer.Params):
        """Params of TextClassifier."""

        vocab_size: int = param("Number of tokens.", default=256)
        output_dim: int = param("Number of classes.", default=REQUIRED)
        dim: int = param("Size of the activations between layers.", default=REQUIRED)
        embedding: Embedding.Params = param(
            "Table of tokens.", default=Embedding.Params(scale="sqrt_dim")
        )
        positions: PositionsBase.Params = param(
            "Positions added to the embeddings.", default=SinusoidalPositions.Params()
        )
        dropout_rate: float = param("Dropout of the embeddings.", default=0.0)
        encoder: StackBase.Params = param(
            "The layers, with attention to the whole text.",
            default=Stack.Params(layer=ENCODER_LAYER),
        )
        encoder_norm: Norm.Params = param(
            "Normalisation after the last layer.", default=LayerNorm.Params()
        )

    embedding: Embedding
    positions: PositionsBase
    dropout: Dropout
    encoder: StackBase
    encoder_norm: Norm
    classifier: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("embedding", with_sizes(p.embedding, vocab_size=p.vocab_size, dim=p.dim))
        self.child("positions", with_sizes(p.positions, dim=p.dim))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("encoder", with_sizes(p.encoder, dim=p.dim))
        self.child("encoder_norm", with_sizes(p.encoder_norm, dim=p.dim))
        classifier = Linear.Params(
            input_dim=p.dim, output_dim=p.output_dim, dims=("embed", "classes")
        )
        self.child("classifier", classifier)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        flow: Flow = {"x": x}
        for piece in self.pieces():
            flow = piece.run(theta, flow, ctx)
        return flow["x"]

    def pieces(self) -> list[Piece]:
        """Returns the embedding, one piece per layer, and the classifier."""
        first: dict[str, Layer] = {"embedding": self.embedding, "positions": self.positions}
        last: dict[str, Layer] = {
            "encoder_norm": self.encoder_norm,
            "classifier": self.classifier,
        }
        return [
            Piece("embedding", first, self._run_embed),
            *pieces_of_stack("encoder", self.encoder, self._run_layers),
            Piece("classifier", last, self._run_classify),
        ]

    def _run_embed(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        ids_BT = flow["x"]
        x = self.embedding.fprop(theta.embedding, ids_BT, ctx)
        x = self.positions.fprop(theta.positions, x, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        is_token = tf.cast(tf.not_equal(ids_BT, 0), tf.float32)
        return {**flow, "x": self.dropout.fprop(Theta(), x, ctx), "is_token": is_token}

    def _run_layers(
        self, compute: Callable[..., tf.Tensor], theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        mask = masking.padding(flow["is_token"])
        return {**flow, "x": compute(theta.encoder, flow["x"], ctx, mask=mask)}

    def _run_classify(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.encoder_norm.fprop(theta.encoder_norm, flow["x"], ctx)
        x = ctx.constrain(x, ("batch", None, "embed"))
        mean = ctx.constrain(mean_over_tokens(x, flow["is_token"]), ("batch", "embed"))
        return {**flow, "x": widen(self.classifier.fprop(theta.classifier, mean, ctx))}
