"""TransformerLm: a decoder-only Transformer over tokens.

    ids ─ embedding (+ positions) ─ dropout ─ stack of causal layers ─ norm ─ softmax

Legend: B batch, T length, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.decoder_only import DecoderOnly
from tekso.models.layers import cache as cache_lib
from tekso.models.layers import masking
from tekso.models.layers.masking import Array
from tekso.models.layers.stack import pieces_of_stack


class TransformerLm(DecoderOnly):
    """Predicts every token from the tokens before it.

    Shapes:
      x of fprop, and ids, labels, positions, segment_ids: [B, T] int
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
    Children: as in DecoderOnly.
    Source: Radford et al. 2018; Vaswani et al. 2017.
    """

    class Params(DecoderOnly.Params):
        """Params of TransformerLm."""

        vocab_size: int = param("Number of tokens.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params, vocab_size=params.vocab_size)

    def hidden(
        self,
        theta: Theta,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        positions: Array | None = None,
        segment_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the input of the softmax.

        Args:
          theta: weights.
          ids: tokens.
          ctx: step context.
          positions: positions of the tokens; by default 0, 1, 2, ….
          segment_ids: segments of packed texts; a token attends to its own segment; 0 is padding.

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
        theta, x = self._embedded(theta, ids, ctx)
        x = self._hidden(theta, x, ctx, positions, segment_ids)
        name, softmax = self._softmax()
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
        """Returns the scores of the next token at every position.

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
        """Returns an empty cache for texts of up to `max_length` tokens."""
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
        """Reads T new tokens from `position`; all steps together give the same result as `logits`.

        Args:
          theta: weights.
          ids: the new tokens: one, or a block.
          cache: cache from `init_cache` or the previous step, with room for the new tokens.
          position: number of tokens read before; one number for all rows, or one per row.
          ctx: step context.
          logits_of: whether to return logits of all tokens of the block, or only of the last.

        Shapes:
          ids: [B, T] int, position: [] or [B] int
          returns: (logits [B, T, V], or [B, 1, V] with "last"; cache)
        """
        positions = cache_lib.positions_of_block(position, ids.shape[1])
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        x = self._enter(theta, x, ctx, positions)
        x, cache = self.stack.extend_step(theta.stack, x, cache, position, ctx)
        if logits_of == "last":
            x = x[:, -1:]
        return self._logits(theta, self._normalise(theta, x, ctx), ctx), cache

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        Every layer of a stack is a piece. Label smoothing applies to training only. The first piece
        takes {"ids", "labels"} and, for packed texts, {"positions", "segment_ids"}. Pieces add "x"
        (activations [B, T, D]) and at last "cross_entropy" [B, T].
        """
        pieces = [
            self._embedding_piece(),
            *pieces_of_stack("stack", self.stack, self._run_layers),
        ]
        if self.params.final_norm is not None:
            norm = {"final_norm": self.final_norm}
            pieces.append(Piece("final_norm", norm, self._run_normalise))
        return [*pieces, self._softmax_piece("labels", label_smoothing)]

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
