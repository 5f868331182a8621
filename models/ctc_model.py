"""A speech recogniser with CTC: samples in, scores of tokens out.

Legend: B batch, N samples, T frames of the encoder's output.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.linear import Linear
from tekso.models.speech_encoder import frames_of, with_frames
from tekso.models.speech_model import SpeechModel


class CtcModel(SpeechModel):
    """Front end, encoder and projection to the tokens and the blank, which is the last one.

    Shapes:
      x: [B, N] samples, float in [-1, 1) or int16
      lengths: [B] int, samples of each utterance; None: N
      returns: FrameSequence with logits [B, T, vocab_size + 1]
    Weights:
      encoder/…, those of the encoder; output/w: [encoder's output_dim, vocab_size + 1]
    """

    class Params(SpeechModel.Params):
        """Params of CtcModel."""

    output: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child(
            "output",
            Linear.Params(
                input_dim=self.encoder.output_dim,
                output_dim=self.params.vocab_size + 1,
                dims=("embed", None),
            ),
        )

    @property
    def blank_id(self) -> int:
        """Token of the blank."""
        return int(self.params.vocab_size)

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        lengths: tf.Tensor | None = None,
    ) -> FrameSequence:
        """See the class."""
        flow: Flow = {"samples": x, "num_samples": lengths}
        for piece in self.pieces():
            flow = piece.run(theta, flow, ctx)
        return frames_of(flow)

    def scores(self, theta: Theta, encoded: FrameSequence, ctx: StepContext) -> FrameSequence:
        """Returns the logits of the tokens for the encoder's output.

        Shapes:
          encoded: features [B, T, output_dim of the encoder]
          returns: features [B, T, vocab_size + 1]
        """
        logits = self.output.fprop(theta.output, encoded.features, ctx)
        return FrameSequence(logits, encoded.lengths)

    def pieces(self) -> list[Piece]:
        """Returns the front end with the first part of the encoder, its layers, and the output."""

        def end(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return with_frames(flow, self.scores(theta, frames_of(flow), ctx))

        return [*self.encoder_pieces(), Piece("output", {"output": self.output}, end)]
