"""Base of the speech recognisers: front end, augmentation and encoder.

Legend: B batch, N samples, T frames of the encoder's output.
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
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.spec_augment import SpecAugment
from tekso.models.speech_encoder import (
    RecurrentEncoder,
    SpeechEncoder,
    StreamError,
    frames_of,
    with_frames,
)


class SpeechModel(Layer):
    """Front end and encoder; a subclass adds an output and defines `pieces`.

    Shapes:
      encode: samples [B, N], float in [-1, 1) or int16; lengths [B] int, None: N
        returns FrameSequence [B, T, output_dim of the encoder]
    Weights:
      encoder/…, those of the encoder
    """

    class Params(Layer.Params):
        """Params of a speech recogniser."""

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

    @property
    def seconds_per_frame(self) -> float:
        """Seconds from one frame of the encoder's output to the next."""
        seconds = self.front_end.step / self.front_end.params.sample_rate
        return float(self.encoder.reduction * seconds)

    def num_frames(self, num_samples: Any) -> Any:
        """Returns the encoder's frames for an int, array or tensor of samples.

        Shapes:
          num_samples, returns: any, the same
        """
        return self.encoder.num_frames(self.front_end.num_frames(num_samples))

    def encode(
        self,
        theta: Theta,
        samples: tf.Tensor,
        ctx: StepContext,
        *,
        lengths: tf.Tensor | None = None,
    ) -> FrameSequence:
        """Returns the output of the encoder; see the class."""
        flow: Flow = {"samples": samples, "num_samples": lengths}
        for piece in self.encoder_pieces():
            flow = piece.run(theta, flow, ctx)
        return frames_of(flow)

    def encoder_pieces(self) -> list[Piece]:
        """Returns the front end with the first part of the encoder, and the encoder's layers."""
        first, *layers = [piece.below("encoder") for piece in self.encoder.pieces()]

        def begin(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            frames = self._features(flow["samples"], flow["num_samples"], ctx)
            return first.run(theta, with_frames(flow, frames), ctx)

        return [Piece("front_end", first.layers, begin), *layers]

    def pieces(self) -> list[Piece]:
        """Returns the parts of the model, for pipelines; the first ones are `encoder_pieces`."""
        raise NotImplementedError(f"{type(self).__name__} has no pieces()")

    # --- chunk by chunk ---

    def check_streams(self) -> None:
        """Checks that a stream can be transcribed while it arrives.

        Raises:
          StreamError: the model needs whole utterances.
        """
        normalize = self.params.normalize
        if normalize is not None and normalize.statistics == "utterance":
            raise StreamError(
                f"{normalize.path_of('statistics')} is 'utterance': set 'global' and the mean and "
                "deviation, or train without normalize"
            )
        _ = self.encoder.stream_frames

    @property
    def stream_samples(self) -> tuple[int, int]:
        """Samples that a chunk of a stream needs, and samples from chunk to chunk."""
        frames = self.encoder.stream_frames * self.encoder.reduction
        step = self.front_end.step
        return (frames - 1) * step + self.front_end.frame_length, frames * step

    def stream_start(self, batch_size: int) -> Any:
        """Returns the state before the first chunk.

        Raises:
          StreamError: the model needs whole utterances.
        """
        self.check_streams()
        return self.encoder.stream_start(batch_size)

    def stream(
        self,
        theta: Theta,
        samples: tf.Tensor,
        lengths: tf.Tensor,
        state: Any,
        ctx: StepContext,
    ) -> tuple[FrameSequence, Any]:
        """Returns the encoder's output for a chunk, and the next state; see `SpeechEncoder`.

        Shapes:
          samples: [B, first of stream_samples]; lengths: [B] int, fewer in the last chunk only
        """
        frames = self._features(samples, lengths, ctx)
        return self.encoder.stream(theta.encoder, frames, state, ctx)

    def _features(self, samples: tf.Tensor, lengths: Any, ctx: StepContext) -> FrameSequence:
        """Returns normalised features, with masks in training."""
        frames = self.front_end.fprop(Theta(), samples, ctx, lengths=lengths)
        for name in ("normalize", "augment"):
            if self.params.get(name) is not None:
                frames = getattr(self, name).fprop(Theta(), frames, ctx)
        return frames
