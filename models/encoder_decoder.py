"""EncoderDecoder: a Transformer with an encoder for the source and a decoder for the target.

    source ─ embedding (+ positions) ─ dropout ─ encoder ─ norm ─ memory
                                                                    │
    target ─ embedding (+ positions) ─ dropout ─ decoder, attends to the memory ─ norm ─ softmax

Rows may be padded and packed: an element attends only to its own segment; segment 0 is padding.

Legend: B batch, S source length, T target length, D model dim, V target vocabulary, N hypotheses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers import masking
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.masking import Array
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.positions import PositionsBase, SinusoidalPositions
from tekso.models.layers.stack import Stack, StackBase, pieces_of_stack
from tekso.models.memory_decoder import (
    DECODER_LAYER,
    ENCODER_LAYER,
    Batch,
    MemoryDecoder,
    decoder_layer,
)

__all__ = ["DECODER_LAYER", "ENCODER_LAYER", "EncoderDecoder", "decoder_layer"]


class EncoderDecoder(MemoryDecoder):
    """Predicts every token of the target from those before it and the whole source.

    Shared tables: with neither `source_embedding` nor `softmax`, source, target and softmax share
    one table; with `source_embedding` alone, target and softmax share one; with both, each has a
    separate table.

    Segment n of the target attends to segment n of the source; 0 is padding.

    Shapes:
      batch, all int32:
        "source_ids", "source_segment_ids": [B, S]
        "target_ids", "target_labels", "target_segment_ids": [B, T]
        packed rows also have "source_positions" [B, S] and "target_positions" [B, T]
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
    Children:
      source_embedding, softmax, source_positions, target_positions, encoder_norm, decoder_norm
        (if set), target_embedding, encoder, decoder
    Source: Vaswani et al. 2017; Press & Wolf 2017 (three tables in one).
    """

    class Params(MemoryDecoder.Params):
        """Params of EncoderDecoder."""

        source_vocab_size: int = param("Number of tokens of the source.", default=REQUIRED)
        source_embedding: Embedding.Params | None = param(
            "Table of source tokens; None: the table of target_embedding. Set scale='sqrt_dim' as "
            "there, so that positions do not dominate.",
            default=None,
        )
        source_positions: PositionsBase.Params | None = param(
            "Positions added to the source embeddings.", default=SinusoidalPositions.Params()
        )
        encoder: StackBase.Params = param(
            "The layers over the source, with attention to the whole source.",
            default=Stack.Params(layer=ENCODER_LAYER),
        )
        encoder_norm: Norm.Params | None = param(
            "Normalisation after the last layer of the encoder.", default=LayerNorm.Params()
        )

    source_positions: PositionsBase
    source_dropout: Dropout
    encoder: StackBase
    encoder_norm: Norm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._add_embeddings()
        for side in ("source", "target"):
            self._add_side(side)
        for name in ("encoder", "decoder"):
            self._add_stack(name)
        self._add_softmax(self.params.dim)
        self._check_attention({"encoder": "none", "decoder": "causal"})

    def _with_target(
        self, theta: Theta, batch: Batch, ctx: StepContext
    ) -> tuple[Theta, tf.Tensor, tf.Tensor]:
        """Returns theta for the softmax, the memory, and the embedded target."""
        target_ids, (name, embedding) = batch["target_ids"], self._source_embedding()
        if self.params.softmax is not None:
            source = embedding.fprop(theta[name], batch["source_ids"], ctx)
            target = self.target_embedding.fprop(theta.target_embedding, target_ids, ctx)
        else:
            source, weights = embedding.fprop_shared(theta[name], batch["source_ids"], ctx)
            theta = Theta(theta, **{name: weights})
            target, weights = self.target_embedding.fprop_shared(
                theta.target_embedding, target_ids, ctx
            )
            theta = Theta(theta, target_embedding=weights)
        return theta, self._encode(theta, source, batch, ctx), target

    def _memory(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        name, embedding = self._source_embedding()
        source = embedding.fprop(theta[name], batch["source_ids"], ctx)
        return self._encode(theta, source, batch, ctx)

    def _memory_mask(self, batch: Batch) -> Array | None:
        return masking.padding(batch["source_segment_ids"])

    def _sides(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        segments = batch["target_segment_ids"]
        return {
            "mask": masking.segments(segments),
            "memory_mask": masking.segments(segments, batch["source_segment_ids"]),
            "positions": batch.get("target_positions"),
        }

    def _encode(self, theta: Theta, source: tf.Tensor, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the memory of the embedded source, [B, S, D]."""
        positions = batch.get("source_positions")
        x = self._enter_source(theta, source, ctx, positions)
        mask = masking.segments(batch["source_segment_ids"])
        x = self.encoder.fprop(theta.encoder, x, ctx, mask=mask, positions=positions)
        return self._normalise("encoder_norm", theta, x, ctx)

    # --- pieces ---

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        Every layer of encoder and decoder is a piece. Label smoothing applies to training only. The
        first piece takes the batch. Pieces add "memory" [B, S, D] (from the source embedding),
        "x" [B, T, D] (from the target embedding) and at last "cross_entropy" [B, T].
        """
        name, embedding = self._source_embedding()
        pieces = [
            self._piece(
                "source_embedding", {name: embedding}, self._run_source, "source_positions"
            ),
            *pieces_of_stack("encoder", self.encoder, self._run_encoder),
        ]
        if self.params.encoder_norm is not None:
            norm = {"encoder_norm": self.encoder_norm}
            pieces.append(Piece("encoder_norm", norm, self._run_encoder_norm))
        return [*pieces, *self._target_pieces(label_smoothing)]

    def _run_source(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        name, embedding = self._source_embedding()
        x = embedding.fprop(theta[name], flow["source_ids"], ctx)
        x = self._enter_source(theta, x, ctx, flow.get("source_positions"))
        return {**flow, "memory": x}

    def _run_encoder(
        self, compute: Callable[..., tf.Tensor], theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        mask = masking.segments(flow["source_segment_ids"])
        positions = flow.get("source_positions")
        x = compute(theta.encoder, flow["memory"], ctx, mask=mask, positions=positions)
        return {**flow, "memory": x}

    def _run_encoder_norm(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "memory": self._normalise("encoder_norm", theta, flow["memory"], ctx)}

    def _enter_source(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, positions: Array | None
    ) -> tf.Tensor:
        """Returns the input of the encoder for embedded tokens."""
        if self.params.source_positions is not None:
            x = self.source_positions.fprop(theta.source_positions, x, ctx, positions=positions)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.source_dropout.fprop(Theta(), x, ctx)
