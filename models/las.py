"""Listen, attend and spell: a speech recogniser with an attention decoder.

Legend: B batch, N samples, T frames of the encoder's output, U labels, R = U + 1 decoder steps,
D embedding_dim, V tokens and the end token, padded to vocab_multiple.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.ctc_loss import ctc_frames_needed, ctc_loss
from tekso.models.decoding.decoder import DecoderStep, repeat_rows, take_rows
from tekso.models.layers import vocabulary
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.linear import Linear
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax
from tekso.models.speech_encoder import frames_of
from tekso.models.speech_model import SpeechModel

CROSS_ENTROPY, CTC = "cross_entropy", "ctc_nats"
"""Names of what the model adds to the flow of pieces; the second one with ctc_weight only."""


class Las(SpeechModel):
    """Front end, encoder ("listener") and recurrent decoder with attention ("speller").

    The end token, which is the last one, is also the decoder's first input. With scheduled
    sampling, some inputs in training are tokens that the model has drawn; then a step waits for the
    one before it. With `ctc_weight`, the encoder is also trained by CTC, which makes it keep the
    order of speech; a search can use its scores too (`CtcDecoder`).

    Shapes:
      x: {"samples" [B, N], "num_samples" [B], "labels" [B, U], "num_labels" [B]}
      returns: -log p(token | samples, tokens before) of the labels and the end token, [B, R]
        float32; what is after the end token does not count
    Weights:
      encoder/…, embedding/table: [V, D], decoder/…, softmax/…
      ctc/w: [encoder's output_dim, V], ctc/b: [V]; with ctc_weight only
    Source: Chan et al. 2016; Lingvo, tasks/asr/decoder.py; scheduled sampling: Bengio et al. 2015;
      CTC and attention: Kim, Hori & Watanabe 2017.
    """

    class Params(SpeechModel.Params):
        """Params of Las."""

        vocab_multiple: int = param(vocabulary.ROWS_DOC, default=1)
        embedding_dim: int = param("Size of an embedded token.", default=96)
        decoder: RecurrentDecoder.Params = param(
            "The layers over the tokens, and the attention; the model sets their sizes.",
            default=RecurrentDecoder.Params(
                num_layers=2, cell=LstmCell.Params(hidden_dim=1024), output="state_and_context"
            ),
        )
        sampled_inputs: float = param(
            "Share of decoder inputs in training that the model draws itself (scheduled sampling).",
            default=0.0,
        )
        ctc_weight: float = param(
            "Weight w of the CTC loss in w * CTC + (1 - w) * attention. 0: no CTC.", default=0.0
        )
        label_smoothing: float = param("Label smoothing in training.", default=0.0)
        dropout_rate: float = param("Dropout of the decoder's output.", default=0.0)

    embedding: Embedding
    decoder: RecurrentDecoder
    softmax: Softmax
    dropout: Dropout
    ctc: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for name in ("sampled_inputs", "ctc_weight"):
            if not 0.0 <= p.get(name) <= 1.0:
                raise ValueError(f"{p.path_of(name)} is {p.get(name)}, must be in 0 … 1")
        tokens = p.vocab_size + 1
        rows = {"vocab_size": tokens, "vocab_multiple": p.vocab_multiple}
        self.child("embedding", Embedding.Params(dim=p.embedding_dim, **rows))
        sizes = {"input_dim": p.embedding_dim, "memory_dim": self.encoder.output_dim}
        self.child("decoder", with_sizes(p.decoder, **sizes))
        output_dim = self.decoder.output_dim
        self.child("softmax", Softmax.Params(input_dim=output_dim, use_bias=True, **rows))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        if p.ctc_weight:
            size = self.encoder.output_dim
            ctc = Linear.Params(input_dim=size, output_dim=tokens, dims=("embed", None))
            self.child("ctc", ctc)

    @property
    def end_id(self) -> int:
        """The token that ends a text, and the decoder's first input."""
        return int(self.params.vocab_size)

    def fprop(self, theta: Theta, x: Flow, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        flow = x
        for piece in self.pieces():
            flow = piece.run(theta, flow, ctx)
        return flow[CROSS_ENTROPY]

    def pieces(self) -> list[Piece]:
        """Returns the encoder's pieces and the decoder, which is one loop."""

        def spell(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            labels = flow["labels"]
            ids = tf.pad(labels, [[0, 0], [1, 0]], constant_values=self.end_id)
            place = tf.expand_dims(tf.range(ids.shape[1]), 0)
            is_end = tf.equal(place, tf.expand_dims(flow["num_labels"], 1))
            targets = tf.where(is_end, self.end_id, tf.pad(labels, [[0, 0], [0, 1]]))
            frames = frames_of(flow)
            draws = ctx.is_training and self.params.sampled_inputs > 0
            run = self._decoded_with_draws if draws else self._decoded
            x = self.dropout.fprop(Theta(), run(theta, ids, frames, ctx), ctx)
            nats = self.softmax.cross_entropy(
                theta.softmax,
                x,
                targets,
                ctx,
                label_smoothing=self.params.label_smoothing if ctx.is_training else 0.0,
            )
            return {**flow, CROSS_ENTROPY: nats}

        names = ("embedding", "decoder", "softmax")
        layers = {name: getattr(self, name) for name in names}
        ctc = [Piece("ctc", {"ctc": self.ctc}, self._run_ctc)] if self.params.ctc_weight else []
        return [*self.encoder_pieces(), *ctc, Piece("decoder", layers, spell)]

    def _run_ctc(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        """Adds the CTC loss of each utterance, 0 if its labels do not fit into its frames."""
        frames = frames_of(flow)
        nats = ctc_loss(
            self.ctc_logits(theta, frames.features, ctx),
            flow["labels"],
            ctx,
            num_frames=frames.lengths,
            num_labels=flow["num_labels"],
            blank_id=self.end_id,
        )
        possible = ctc_frames_needed(flow["labels"], flow["num_labels"]) <= frames.lengths
        return {**flow, CTC: tf.where(possible, nats, tf.zeros_like(nats))}

    def ctc_logits(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the CTC scores of the labels and, last, the blank; with ctc_weight only.

        Shapes:
          encoded: [B, T, output_dim of the encoder]
          returns: [B, T, vocab_size + 1]
        """
        return self.ctc.fprop(theta.ctc, encoded, ctx)

    def _decoded(
        self, theta: Theta, ids: tf.Tensor, frames: FrameSequence, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the decoder's output for given inputs ids [B, R]: [B, R, output_dim]."""
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        x = ctx.constrain(x, ("batch", None, "embed"))
        mask = tf.repeat(tf.expand_dims(frames.mask, 1), ids.shape[1], axis=1)
        encoded = frames.features
        return self.decoder.decode(theta.decoder, x, ctx, encoded=encoded, mask=mask).output

    def _decoded_with_draws(
        self, theta: Theta, ids: tf.Tensor, frames: FrameSequence, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the decoder's output [B, R, output_dim], with drawn tokens as some inputs."""
        batch, tokens = ids.shape[0], self.params.vocab_size + 1
        memory = self.decoder.memory(theta.decoder, frames.features, ctx)
        shared = Theta(
            embedding=theta.embedding,
            decoder=theta.decoder,
            softmax=theta.softmax,
            memory=Theta(memory),
            mask=tf.cast(frames.mask, tf.float32),
        )

        def step(theta: Theta, state: Any, x: tf.Tensor, ctx: StepContext) -> tuple[Any, Any]:
            draws = ctx.uniform(self, [batch], "feed") < self.params.sampled_inputs
            x = self._embedded(theta, tf.where(draws, state["drawn"], x), ctx)
            found, after = self.decoder.step(
                theta.decoder, x, state["decoder"], ctx, memory=theta.memory, mask=theta.mask > 0
            )
            logits = tf.stop_gradient(self.softmax.logits(theta.softmax, found.output, ctx))
            logits = ctx.constrain(tf.cast(logits, tf.float32), ("batch", None))[:, :tokens]
            noise = ctx.uniform(self, [batch, tokens], "draw")
            # The largest of log-probabilities with Gumbel noise is a draw.
            drawn = tf.argmax(logits - tf.math.log(-tf.math.log(noise)), 1, output_type=tf.int32)
            return {"decoder": after, "drawn": drawn}, found.output

        begin = self.decoder.zero_state(
            batch, frames.features.dtype, source_length=frames.features.shape[1]
        )
        begin = self.decoder.constrained(begin, ctx)
        state = {"decoder": begin, "drawn": tf.fill([batch], self.end_id)}
        _, y = ops.scan(ctx, step, shared, state, tf.transpose(ids))
        return ctx.constrain(tf.transpose(y, [1, 0, 2]), ("batch", None, "embed"))

    def _embedded(self, theta: Theta, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        return ctx.constrain(x, ("batch", "embed"))

    # --- token by token ---

    def start_decoding(
        self, theta: Theta, batch: Mapping[str, tf.Tensor], max_length: int, ctx: StepContext
    ) -> Any:
        """Returns the state of one hypothesis per utterance; see `Decoder`.

        Args:
          theta: weights.
          batch: "encoded" [B, T, …], the encoder's output; "source_segment_ids" [B, T].
          max_length: ignored.
          ctx: step context.
        """
        del max_length
        encoded, segments = batch["encoded"], batch["source_segment_ids"]
        memory = self.decoder.memory(theta.decoder, encoded, ctx)
        size, length, _ = encoded.shape
        state = self.decoder.zero_state(size, encoded.dtype, source_length=length)
        source = {"memory": memory, "mask": tf.not_equal(segments, 0)}
        return {"source": source, "hypotheses": state}

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """Computes a step; the position is ignored. See `Decoder`."""
        del position
        source = state["source"]
        found, hypotheses = self.decoder.step(
            theta.decoder,
            self._embedded(theta, ids, ctx),
            state["hypotheses"],
            ctx,
            memory=source["memory"],
            mask=source["mask"],
        )
        logits = tf.cast(self.softmax.logits(theta.softmax, found.output, ctx), tf.float32)
        attention = tf.cast(found.probabilities, tf.float32)
        return DecoderStep(logits, attention, {"source": source, "hypotheses": hypotheses})

    def expand(self, state: Any, k: int) -> Any:
        """See `Decoder`."""
        return {**state, "hypotheses": repeat_rows(state["hypotheses"], k)}

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        """See `Decoder`."""
        return {**state, "hypotheses": take_rows(state["hypotheses"], rows)}
