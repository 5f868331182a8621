"""TransformerLm: a decoder-only Transformer over tokens.

    ids ─ embedding (+ positions) ─ dropout ─ stack of causal layers ─ norm ─ softmax

Legend: B batch, T length, D model dim, V vocabulary, N heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers import cache as cache_lib
from tekso.models.layers import masking
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.masking import Array
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.positions import PositionsBase, SinusoidalPositions
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack, StackBase, pieces_of_stack
from tekso.models.layers.transformer import TransformerLayer

CAUSAL_LAYER = TransformerLayer.Params(attention=MultiHeadAttention.Params(mask="causal"))


class TransformerLm(Layer):
    """Predicts every token from those before it.

    Children:
      embedding, positions (where set), stack, final_norm (where set), softmax (where untied)
    Source: Radford et al. 2018; Vaswani et al. 2017.
    """

    class Params(Layer.Params):
        """Params of TransformerLm."""

        vocab_size: int = param("Number of tokens.", default=REQUIRED)
        dim: int = param("Size of the activations between layers.", default=REQUIRED)
        embedding: Embedding.Params = param("Table of tokens.", default=Embedding.Params())
        positions: PositionsBase.Params | None = param(
            "What is added to the embeddings.", default=SinusoidalPositions.Params()
        )
        dropout_rate: float = param("Dropout of the embeddings.", default=0.0)
        stack: StackBase.Params = param(
            "The layers; their attention has to be causal.",
            default=Stack.Params(layer=CAUSAL_LAYER),
        )
        final_norm: Norm.Params | None = param(
            "Normalisation after the last layer.", default=LayerNorm.Params()
        )
        softmax: Softmax.Params | None = param(
            "Output layer with a table of its own; None: tied to the embedding.", default=None
        )

    embedding: Embedding
    positions: PositionsBase
    dropout: Dropout
    stack: StackBase
    final_norm: Norm
    softmax: Softmax

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("embedding", with_sizes(p.embedding, vocab_size=p.vocab_size, dim=p.dim))
        if p.positions is not None:
            self.child("positions", with_sizes(p.positions, dim=p.dim))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("stack", with_sizes(p.stack, dim=p.dim))
        if p.final_norm is not None:
            self.child("final_norm", with_sizes(p.final_norm, dim=p.dim))
        if p.softmax is not None:
            self.child("softmax", with_sizes(p.softmax, input_dim=p.dim, vocab_size=p.vocab_size))
        for layer in self.stack.walk():
            if isinstance(layer, MultiHeadAttention) and layer.params.mask != "causal":
                raise ValueError(
                    f"TransformerLm: {layer.path} has mask={layer.params.mask!r}, so a token would "
                    "be predicted from itself; set mask='causal'"
                )

    def hidden(
        self,
        theta: Theta,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        positions: Array | None = None,
        segment_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns what the softmax sees.

        Args:
          theta: weights.
          ids: tokens.
          ctx: step context.
          positions: of the tokens; by default 0, 1, 2, ….
          segment_ids: where texts are packed: a token sees those of its own segment; 0 is padding.

        Shapes:
          ids, positions, segment_ids: [B, T] int
          returns: [B, T, D]
        """
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        return self._hidden(theta, x, ctx, positions, segment_ids)

    def _hidden(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        positions: Array | None,
        segment_ids: tf.Tensor | None,
    ) -> tf.Tensor:
        x = self._enter(theta, x, ctx, positions)
        mask = None if segment_ids is None else masking.segments(segment_ids)
        x = self.stack.fprop(theta.stack, x, ctx, mask=mask, positions=positions)
        return self._normalise(theta, x, ctx)

    def token_cross_entropy(
        self,
        theta: Theta,
        ids: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
        *,
        positions: Array | None = None,
        segment_ids: tf.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns -log p(label | tokens up to here) of every position, in nats.

        Shapes:
          ids, labels, positions, segment_ids: [B, T] int
          returns: [B, T] float32
        """
        name, softmax = self._softmax()
        if softmax is self.embedding:
            x, shared = self.embedding.fprop_shared(theta.embedding, ids, ctx)
            theta = Theta(theta, embedding=shared)
        else:
            x = self.embedding.fprop(theta.embedding, ids, ctx)
        x = self._hidden(theta, x, ctx, positions, segment_ids)
        return softmax.cross_entropy(theta[name], x, labels, ctx, label_smoothing=label_smoothing)

    def logits(
        self,
        theta: Theta,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        positions: Array | None = None,
        segment_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the scores of all tokens that may follow, at every position.

        Shapes:
          ids, positions, segment_ids: [B, T] int
          returns: [B, T, V]
        """
        x = self.hidden(theta, ids, ctx, positions=positions, segment_ids=segment_ids)
        return self._logits(theta, x, ctx)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the logits of the tokens x; see `logits`."""
        return self.logits(theta, x, ctx)

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns the empty cache of a text of up to `max_length` tokens."""
        return self.stack.init_cache(batch_size, max_length, dtype)

    def extend_step(
        self,
        theta: Theta,
        ids: tf.Tensor,
        cache: Any,
        position: Any,
        ctx: StepContext,
        *,
        logits_of: Literal["all", "last"] = "all",
    ) -> tuple[tf.Tensor, Any]:
        """Reads T further tokens, of which the first is at `position`; equals `logits` over all.

        Args:
          theta: weights.
          ids: the further tokens: one, or a block.
          cache: of `init_cache` or of the step before; it must have room for them.
          position: how many tokens were read before; one for all rows, or one a row.
          ctx: step context.
          logits_of: all tokens of the block, or the last alone.

        Shapes:
          ids: [B, T] int, position: [] or [B] int
          returns: (logits [B, T, V], or [B, 1, V] of the last, cache)
        """
        positions = cache_lib.positions_of_block(position, ids.shape[1])
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        x = self._enter(theta, x, ctx, positions)
        x, cache = self.stack.extend_step(theta.stack, x, cache, position, ctx)
        if logits_of == "last":
            x = x[:, -1:]
        return self._logits(theta, self._normalise(theta, x, ctx), ctx), cache

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the parts of `token_cross_entropy` in order, between which it can be cut.

        Every layer of a stack is a piece. Labels are smoothed in training only. What flows: first
        {"ids", "labels"} and, where texts are packed, {"positions", "segment_ids"}; then also "x",
        the activations [B, T, D]; the last piece adds "cross_entropy" [B, T].
        """
        inputs: dict[str, Layer] = {"embedding": self.embedding}
        if self.params.positions is not None:
            inputs["positions"] = self.positions
        pieces = [Piece("embedding", inputs, self._run_embed)]
        pieces += pieces_of_stack("stack", self.stack, self._run_layers)
        if self.params.final_norm is not None:
            norm = {"final_norm": self.final_norm}
            pieces.append(Piece("final_norm", norm, self._run_normalise))
        name, softmax = self._softmax()
        last = functools.partial(self._run_cross_entropy, label_smoothing)
        return [*pieces, Piece("softmax", {name: softmax}, last)]

    def _run_embed(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.embedding.fprop(theta.embedding, flow["ids"], ctx)
        return {**flow, "x": self._enter(theta, x, ctx, flow.get("positions"))}

    def _run_layers(
        self, compute: Callable[..., tf.Tensor], theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        segment_ids, positions = flow.get("segment_ids"), flow.get("positions")
        mask = None if segment_ids is None else masking.segments(segment_ids)
        x = compute(theta.stack, flow["x"], ctx, mask=mask, positions=positions)
        return {**flow, "x": x}

    def _run_normalise(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self._normalise(theta, flow["x"], ctx)}

    def _run_cross_entropy(
        self, label_smoothing: float, theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        name, softmax = self._softmax()
        cross_entropy = softmax.cross_entropy(
            theta[name],
            flow["x"],
            flow["labels"],
            ctx,
            label_smoothing=label_smoothing if ctx.is_training else 0.0,
        )
        return {**flow, "cross_entropy": cross_entropy}

    def _enter(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, positions: Array | None
    ) -> tf.Tensor:
        """From the vectors of the tokens to the input of the stack."""
        if self.params.positions is not None:
            x = self.positions.fprop(theta.positions, x, ctx, positions=positions)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.dropout.fprop(Theta(), x, ctx)

    def _normalise(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        if self.params.final_norm is None:
            return x
        return self.final_norm.fprop(theta.final_norm, x, ctx)

    def _softmax(self) -> tuple[str, Any]:
        """The layer with the output table, and its name."""
        if self.params.softmax is None:
            return "embedding", self.embedding
        return "softmax", self.softmax

    def _logits(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        name, softmax = self._softmax()
        return softmax.logits(theta[name], x, ctx)
