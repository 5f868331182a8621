"""LstmEncoderDecoder: an LSTM encoder, and an LSTM decoder with attention to the source.

    source ─ embedding ─ dropout ─ encoder (first layer in both directions) ─ encoded
                                                                                │ attention
    target ─ embedding ─ dropout ─ decoder (with input feeding) ─ softmax

Rows may be padded and packed: states are reset to 0 in every segment (in the backward direction at
its last token), and a target attends to the source of its own segment; segment 0 is padding.

Legend: B sources, K hypotheses per source, N = B * K, S source length, T target length,
D embedding dim, M size of the encoder's output, V target vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece, of_layers
from tekso.framework.theta import Theta
from tekso.models.decoding.decoder import DecoderStep, repeat_rows, take_rows
from tekso.models.layers import masking
from tekso.models.layers.attentive_recurrent import Attended
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.recurrent import RecurrentStack, segment_flags
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax
from tekso.models.shared_tables import SharedTables

Batch = Mapping[str, tf.Tensor]


class LstmEncoderDecoder(SharedTables):
    """Predicts every token of the target from those before it and the whole source.

    The decoder starts with zero states and receives information on the source only by attention.

    Shared tables: without `source_embedding`, source and target share one table; without `softmax`,
    target embedding and softmax share one.

    Positions in a batch are ignored, because the recurrence already knows the order.

    Shapes:
      batch, all int32:
        "source_ids": [B, S]; "target_ids", "target_labels": [B, T]
        padded or packed rows also have "source_segment_ids" [B, S], "target_segment_ids" [B, T]
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
    Children:
      source_embedding, softmax (if set), target_embedding, encoder, decoder
    Source:
      Bahdanau et al. 2015; Luong et al. 2015; Wu et al. 2016 (GNMT); Chen et al. 2018 (RNMT+).
    """

    class Params(SharedTables.Params):
        """Params of LstmEncoderDecoder."""

        source_vocab_size: int = param("Number of tokens of the source.", default=REQUIRED)
        target_vocab_size: int = param("Number of tokens of the target.", default=REQUIRED)
        dim: int = param(
            "Size of an embedded token, and number of units of a layer where that is not set.",
            default=REQUIRED,
        )
        source_embedding: Embedding.Params | None = param(
            "Table of source tokens; None: the table of target_embedding.", default=None
        )
        target_embedding: Embedding.Params = param(
            "Table of target tokens.", default=Embedding.Params()
        )
        softmax: Softmax.Params | None = param(
            "Output layer with a separate table; None: tied to target_embedding.",
            default=Softmax.Params(use_bias=True),
        )
        encoder: RecurrentStack.Params = param(
            "The layers over the source; the model sets their input_dim.",
            default=RecurrentStack.Params(num_layers=2, direction="bidirectional_first"),
        )
        decoder: RecurrentDecoder.Params = param(
            "The layers over the target, and the attention; the model sets their sizes.",
            default=RecurrentDecoder.Params(num_layers=2),
        )
        dropout_rate: float = param(
            "Dropout of the embedded tokens and of the decoder's output.", default=0.0
        )

    encoder: RecurrentStack
    decoder: RecurrentDecoder
    source_dropout: Dropout
    target_dropout: Dropout
    output_dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._add_embeddings()
        for name in ("source_dropout", "target_dropout", "output_dropout"):
            self.child(name, Dropout.Params(rate=p.dropout_rate))
        self.child("encoder", with_sizes(_with_units(p.encoder, p.dim), input_dim=p.dim))
        sizes = {"input_dim": p.dim, "memory_dim": self.encoder.output_dim}
        self.child("decoder", with_sizes(_with_units(p.decoder, p.dim), **sizes))
        output_dim = self.decoder.output_dim
        self._add_softmax(output_dim)
        if p.softmax is None and output_dim != p.dim:
            raise ValueError(
                f"LstmEncoderDecoder: the decoder's output has {output_dim} elements, but an "
                f"embedded token has {p.dim}, so the softmax cannot be tied to the embedding: set "
                "softmax, or make the sizes equal"
            )

    # --- the whole target at once ---

    def token_cross_entropy(
        self, theta: Theta, batch: Batch, ctx: StepContext, *, label_smoothing: float = 0.0
    ) -> tf.Tensor:
        """Returns -log p(label | source, target up to here) of every position, in nats.

        Shapes:
          batch: see the class
          returns: [B, T] float32
        """
        x = self._dropped(self._decoded(theta, batch, ctx).output, ctx)
        return self._cross_entropy(theta, x, batch["target_labels"], ctx, label_smoothing)

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the next token at every position of the target: [B, T, V]."""
        x = self._dropped(self._decoded(theta, batch, ctx).output, ctx)
        return self._logits(theta, x, ctx)

    def attention(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns attention weights of the target over the source: [B, T, S] float32.

        Each position sums to 1, or to 0 for padding.
        """
        return tf.cast(self._decoded(theta, batch, ctx).probabilities, tf.float32)

    def fprop(self, theta: Theta, x: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the logits of the batch x; see `logits`."""
        return self.logits(theta, x, ctx)

    def _decoded(self, theta: Theta, batch: Batch, ctx: StepContext) -> Attended:
        return self.decoder.decode(
            theta.decoder,
            self._embedded_target(theta, batch["target_ids"], ctx),
            ctx,
            encoded=self._encoded(theta, batch, ctx),
            mask=_attention_mask(batch),
            reset=_begins(batch, "target"),
        )

    def _encoded(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        x = self._embedded_source(theta, batch["source_ids"], ctx)
        return self.encoder.fprop(theta.encoder, x, ctx, reset=_begins(batch, "source"))

    def _embedded_source(self, theta: Theta, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        name, embedding = self._source_embedding()
        x = embedding.fprop(theta[name], ids, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.source_dropout.fprop(Theta(), x, ctx)

    def _embedded_target(self, theta: Theta, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        x = self.target_embedding.fprop(theta.target_embedding, ids, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.target_dropout.fprop(Theta(), x, ctx)

    def _dropped(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.output_dropout.fprop(Theta(), x, ctx)

    # --- in pieces ---

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        Every layer is a piece, except that the decoder layers in one loop with the attention are
        one piece (with input_feeding "attentional", all of them). Label smoothing applies to
        training only. The first piece takes the batch. Pieces add "x" (activations), "encoded"
        [B, S, M] (from the target embedding), "context" [B, T, M] (from the attention) and at last
        "cross_entropy" [B, T].
        """
        (source_name, source), (output_name, softmax) = self._source_embedding(), self._softmax()
        target = {"target_embedding": self.target_embedding}
        attentive = {"decoder/attentive": self.decoder.attentive}
        last = functools.partial(self._run_softmax, label_smoothing)
        return [
            Piece("source_embedding", {source_name: source}, self._run_source),
            *of_layers("encoder/layers", self.encoder.layers, self._run_encoder_layer),
            Piece("target_embedding", target, self._run_target),
            Piece("decoder/attentive", attentive, self._run_attentive),
            *of_layers("decoder/layers", self.decoder.layers, self._run_decoder_layer),
            Piece("softmax", {output_name: softmax}, last),
        ]

    def _run_source(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self._embedded_source(theta, flow["source_ids"], ctx)}

    def _run_encoder_layer(self, index: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        reset = _begins(flow, "source")
        x = self.encoder.fprop_layer(index, theta.encoder, flow["x"], ctx, reset=reset)
        return {**flow, "x": x}

    def _run_target(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self._embedded_target(theta, flow["target_ids"], ctx)
        return {**flow, "encoded": flow["x"], "x": x}

    def _run_attentive(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        found = self.decoder.attentive.decode(
            theta.decoder.attentive,
            flow["x"],
            ctx,
            encoded=flow["encoded"],
            mask=_attention_mask(flow),
            reset=_begins(flow, "target"),
        )
        return {**flow, "x": found.output, "context": found.context}

    def _run_decoder_layer(self, index: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        reset = _begins(flow, "target")
        x = self.decoder.fprop_layer(
            index, theta.decoder, flow["x"], flow["context"], ctx, reset=reset
        )
        return {**flow, "x": x}

    def _run_softmax(
        self, label_smoothing: float, theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        x = self._dropped(self.decoder.fprop_output(flow["x"], flow["context"], ctx), ctx)
        smoothing = label_smoothing if ctx.is_training else 0.0
        loss = self._cross_entropy(theta, x, flow["target_labels"], ctx, smoothing)
        return {**flow, "cross_entropy": loss}

    # --- token by token ---

    def start_decoding(self, theta: Theta, batch: Batch, max_length: int, ctx: StepContext) -> Any:
        """Encodes the sources; the state size does not depend on max_length. See `Decoder`.

        Shapes:
          returns: {"source": {"memory": {"keys" [B, S, …], "values" [B, S, M]}, "mask" [B, S]},
            "hypotheses": states and the fed vector, [B, …]}
        """
        encoded = self._encoded(theta, batch, ctx)
        segments = batch.get("source_segment_ids")
        mask = (
            tf.ones(encoded.shape[:2], tf.bool) if segments is None else tf.not_equal(segments, 0)
        )
        memory = self.decoder.memory(theta.decoder, encoded, ctx)
        state = self.decoder.zero_state(
            encoded.shape[0], encoded.dtype, source_length=encoded.shape[1]
        )
        return {"source": {"memory": memory, "mask": mask}, "hypotheses": state}

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """Computes a step; the position is ignored. See `Decoder`."""
        source = state["source"]
        x = self.target_embedding.fprop(theta.target_embedding, ids, ctx)
        found, hypotheses = self.decoder.step(
            theta.decoder,
            ctx.constrain(x, ("batch", "embed")),
            state["hypotheses"],
            ctx,
            memory=source["memory"],
            mask=source["mask"],
        )
        logits = tf.cast(self._logits(theta, found.output, ctx), tf.float32)
        attention = tf.cast(found.probabilities, tf.float32)
        return DecoderStep(logits, attention, {"source": source, "hypotheses": hypotheses})

    def expand(self, state: Any, k: int) -> Any:
        """See `Decoder`."""
        return {**state, "hypotheses": repeat_rows(state["hypotheses"], k)}

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        """See `Decoder`."""
        return {**state, "hypotheses": take_rows(state["hypotheses"], rows)}


def _with_units(params: Any, dim: int) -> Any:
    """Returns Params of recurrent layers with dim units, unless their number is set."""
    params = params.copy()
    if params.cell.hidden_dim is REQUIRED:
        params.cell.hidden_dim = dim
    return params


def _begins(batch: Batch, side: str) -> tf.Tensor | None:
    """Returns where segments or padding begin on a side: bool [B, length]; None without segments.

    These resets suffice for padding: states are reset at every segment, in both directions, and no
    target attends to padding. The loops therefore need no padding mask.
    """
    return segment_flags(batch.get(f"{side}_segment_ids")).get("reset")


def _attention_mask(batch: Batch) -> tf.Tensor | None:
    """Returns the attention mask of the target over the source: bool [B, T, S]; None: no mask."""
    target, source = batch.get("target_segment_ids"), batch.get("source_segment_ids")
    if target is None or source is None:
        return None
    return tf.squeeze(masking.segments(target, source), 1)
