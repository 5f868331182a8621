"""A speech recogniser with CTC: samples in, log-probabilities of tokens out.

Legend: B batch, N samples, T frames of the encoder's output, V tokens and the blank.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.frames import FrameSequence, NormalizeFrames
from tekso.models.layers.linear import Linear
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.spec_augment import SpecAugment
from tekso.models.speech_encoder import (
    RecurrentEncoder,
    SpeechEncoder,
    frames_of,
    with_frames,
)


class CtcModel(Layer):
    """Front end, encoder and projection to the tokens and the blank, which is the last one.

    Shapes:
      x: [B, N] samples, float in [-1, 1) or int16
      lengths: [B] int, samples of each utterance; None: N
      returns: FrameSequence with logits [B, T, vocab_size + 1]
    Weights:
      encoder/…, those of the encoder; output/w: [encoder's output_dim, vocab_size + 1]
    """

    class Params(Layer.Params):
        """Params of CtcModel."""

        vocab_size: int = param("Number of tokens, without the blank.", default=REQUIRED)
        front_end: LogMel.Params = param("From samples to features.", default=LogMel.Params())
        normalize: NormalizeFrames.Params | None = param(
            "Normalises the features; None: not.", default=NormalizeFrames.Params()
        )
        augment: SpecAugment.Params | None = param(
            "Masks features in training; None: not.", default=None
        )
        encoder: SpeechEncoder.Params = param("The encoder.", default=RecurrentEncoder.Params())

    front_end: LogMel
    encoder: SpeechEncoder
    output: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("front_end", p.front_end)
        channels = self.front_end.output_dim
        if p.normalize is not None:
            self.child("normalize", with_sizes(p.normalize, input_dim=channels))
        if p.augment is not None:
            self.child("augment", p.augment)
        self.child("encoder", with_sizes(p.encoder, input_dim=channels))
        self.child(
            "output",
            Linear.Params(
                input_dim=self.encoder.output_dim,
                output_dim=p.vocab_size + 1,
                dims=("embed", None),
            ),
        )

    @property
    def blank_id(self) -> int:
        """Token of the blank."""
        return int(self.params.vocab_size)

    def num_frames(self, num_samples: Any) -> Any:
        """Returns the frames of the logits for an int, array or tensor of samples.

        Shapes:
          num_samples, returns: any, the same
        """
        return self.encoder.num_frames(self.front_end.num_frames(num_samples))

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

    def pieces(self) -> list[Piece]:
        """Returns the front end with the first part of the encoder, its layers, and the output."""
        first, *layers = [piece.below("encoder") for piece in self.encoder.pieces()]

        def begin(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            frames = self._features(flow["samples"], flow["num_samples"], ctx)
            rest = {name: value for name, value in flow.items() if name != "samples"}
            return first.run(theta, with_frames(rest, frames), ctx)

        def end(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            frames = frames_of(flow)
            logits = self.output.fprop(theta.output, frames.features, ctx)
            return with_frames(flow, FrameSequence(logits, frames.lengths))

        return [
            Piece("front_end", first.layers, begin),
            *layers,
            Piece("output", {"output": self.output}, end),
        ]

    def _features(self, samples: tf.Tensor, lengths: Any, ctx: StepContext) -> FrameSequence:
        """Returns normalised features, with masks in training."""
        frames = self.front_end.fprop(Theta(), samples, ctx, lengths=lengths)
        for name in ("normalize", "augment"):
            if self.params.get(name) is not None:
                frames = getattr(self, name).fprop(Theta(), frames, ctx)
        return frames
