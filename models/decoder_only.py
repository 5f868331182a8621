"""DecoderOnly: base of the models with one causal stack over tokens.

    ids ─ embedding (+ positions) ─ dropout ─ stack ─ norm ─ softmax

Legend: B batch, T length, D model dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.masking import Array
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.positions import PositionsBase, SinusoidalPositions
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack, StackBase
from tekso.models.layers.transformer import TransformerLayer

CAUSAL_LAYER = TransformerLayer.Params(attention=MultiHeadAttention.Params(mask="causal"))


class DecoderOnly(Layer):
    """Base with embedding, stack and softmax; a subclass defines the inputs.

    Shapes:
      fprop returns: logits [B, T, V]
      token_cross_entropy returns: [B, T] float32
      The stack takes and returns [B, length, D]; a subclass defines the length.
    Children:
      embedding, positions (if set), stack, final_norm (if set), softmax (if untied)
    """

    class Params(Layer.Params):
        """Params of DecoderOnly."""

        dim: int = param("Size of the activations between layers.", default=REQUIRED)
        embedding: Embedding.Params = param(
            "Table of tokens; scaled, so that positions do not dominate.",
            default=Embedding.Params(scale="sqrt_dim"),
        )
        positions: PositionsBase.Params | None = param(
            "Positions added to the embeddings.", default=SinusoidalPositions.Params()
        )
        dropout_rate: float = param("Dropout of the embeddings.", default=0.0)
        stack: StackBase.Params = param(
            "The layers; their attention must be causal.",
            default=Stack.Params(layer=CAUSAL_LAYER),
        )
        final_norm: Norm.Params | None = param(
            "Normalisation after the last layer.", default=LayerNorm.Params()
        )
        softmax: Softmax.Params | None = param(
            "Output layer with a separate table; None: tied to the embedding.", default=None
        )

    embedding: Embedding
    positions: PositionsBase
    dropout: Dropout
    stack: StackBase
    final_norm: Norm
    softmax: Softmax

    def __init__(self, params: Any, *, vocab_size: int) -> None:
        super().__init__(params)
        p = self.params
        self.child("embedding", with_sizes(p.embedding, vocab_size=vocab_size, dim=p.dim))
        if p.positions is not None:
            self.child("positions", with_sizes(p.positions, dim=p.dim))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("stack", with_sizes(p.stack, dim=p.dim))
        if p.final_norm is not None:
            self.child("final_norm", with_sizes(p.final_norm, dim=p.dim))
        if p.softmax is not None:
            self.child("softmax", with_sizes(p.softmax, input_dim=p.dim, vocab_size=vocab_size))
        for layer in self.stack.walk():
            if isinstance(layer, MultiHeadAttention) and layer.params.mask != "causal":
                raise ValueError(
                    f"{type(self).__name__}: {layer.path} has mask={layer.params.mask!r}, so a "
                    "token would be predicted from itself; set mask='causal'"
                )

    def _embedded(self, theta: Theta, ids: tf.Tensor, ctx: StepContext) -> tuple[Theta, tf.Tensor]:
        """Returns theta for the softmax, and the embedded tokens."""
        if self.params.softmax is not None:
            return theta, self.embedding.fprop(theta.embedding, ids, ctx)
        x, shared = self.embedding.fprop_shared(theta.embedding, ids, ctx)
        return Theta(theta, embedding=shared), x

    def _enter(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, positions: Array | None
    ) -> tf.Tensor:
        """Returns the input of the stack for embedded tokens."""
        if self.params.positions is not None:
            x = self.positions.fprop(theta.positions, x, ctx, positions=positions)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.dropout.fprop(Theta(), x, ctx)

    def _normalise(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        if self.params.final_norm is None:
            return x
        return self.final_norm.fprop(theta.final_norm, x, ctx)

    def _softmax(self) -> tuple[str, Any]:
        """Returns the name of the layer with the output table, and the layer."""
        if self.params.softmax is None:
            return "embedding", self.embedding
        return "softmax", self.softmax

    def _logits(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        name, softmax = self._softmax()
        return softmax.logits(theta[name], x, ctx)

    # --- pieces ---

    def _embedding_piece(self) -> Piece:
        layers: dict[str, Layer] = {"embedding": self.embedding}
        if self.params.positions is not None:
            layers["positions"] = self.positions
        return Piece("embedding", layers, self._run_embed)

    def _run_embed(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        """Adds "x", the input of the stack."""
        raise NotImplementedError

    def _softmax_piece(self, labels: str, label_smoothing: float) -> Piece:
        """Returns the last piece, which adds "cross_entropy" of the array `labels`."""
        name, softmax = self._softmax()

        def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            smoothing = label_smoothing if ctx.is_training else 0.0
            cross_entropy = softmax.cross_entropy(
                theta[name], flow["x"], flow[labels], ctx, label_smoothing=smoothing
            )
            return {**flow, "cross_entropy": cross_entropy}

        return Piece("softmax", {name: softmax}, run)
