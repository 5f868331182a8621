"""Encoders of speech: from features to a sequence that is four times shorter.

Legend: B batch, T frames, D output_dim.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import window_ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.linear import Linear
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import KERNEL_ADAPTER_DOC
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.sizes import with_sizes

FEATURES, LENGTHS = "features", "num_frames"
"""Names of the frames in the flow of pieces."""


class ConvSubsampling(Layer):
    """Two 3x3 convolutions of stride 2 over time and channels, with ReLU, and a projection.

    Output t of a convolution is computed from frames 2 t - 1 to 2 t + 1 of its input. Padding is 0
    before each convolution, so it has no effect on an utterance.

    Shapes:
      x: features [B, T, input_dim]
      returns: features [B, ceil(T / 4), output_dim]
    Weights:
      first/…, second/…, those of Conv2D; projection/…, those of Linear
    Source: Gulati et al. 2020, section 2.
    """

    class Params(Layer.Params):
        """Params of ConvSubsampling."""

        input_dim: int = param("Number of features.", default=REQUIRED)
        output_dim: int = param("Size of the last dim of the output.", default=REQUIRED)
        num_filters: int | None = param(
            "Outputs of each convolution. None: output_dim.", default=None
        )
        bias_init: Initializer.Params = param(
            "Initializer of the projection's bias.", default=Zeros.Params()
        )
        kernel_adapter: Lora.Params | None = param(KERNEL_ADAPTER_DOC, default=None)

    first: Conv2D
    second: Conv2D
    projection: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        filters = p.num_filters or p.output_dim
        halving = Conv2D.Params(
            output_dim=filters,
            strides=(2, 2),
            activation="relu",
            kernel_adapter=p.kernel_adapter,
        )
        self.child("first", halving.copy().set(input_dim=1))
        self.child("second", halving.copy().set(input_dim=filters))
        height = -(-p.input_dim // 4)
        self.child(
            "projection",
            Linear.Params(
                input_dim=height * filters,
                output_dim=p.output_dim,
                bias_init=p.bias_init,
                dims=(None, "embed"),
            ),
        )

    def num_frames(self, num_frames: Any) -> Any:
        """Returns the output's frames for an int, array or tensor of frames of the input.

        Shapes:
          num_frames, returns: any, the same
        """
        return _halved(_halved(num_frames))

    def fprop(self, theta: Theta, x: FrameSequence, ctx: StepContext) -> FrameSequence:
        """See the class."""
        frames = x.with_features(x.features)
        image = window_ops.constrain_image(ctx, tf.expand_dims(frames.features, 3))
        lengths = frames.lengths
        for name in ("first", "second"):
            batch, length, height, filters = image.shape
            if length % 2 == 0:  # of an even length, padding SAME would begin one frame later
                image = tf.concat([image, tf.zeros([batch, 1, height, filters], image.dtype)], 1)
            image = getattr(self, name).fprop(theta[name], image, ctx)[:, : _halved(length)]
            lengths = _halved(lengths)
            batch, length, height, filters = image.shape
            flat = FrameSequence(tf.reshape(image, [batch, length, height * filters]), lengths)
            flat = flat.with_features(flat.features)
            image = window_ops.constrain_image(
                ctx, tf.reshape(flat.features, [batch, length, height, filters])
            )
        features = ctx.constrain(flat.features, ("batch", None, None))
        return flat.with_features(self.projection.fprop(theta.projection, features, ctx))

    def stream(
        self, theta: Theta, x: FrameSequence, before: tf.Tensor, ctx: StepContext
    ) -> tuple[FrameSequence, tf.Tensor]:
        """Returns the output of a chunk of a stream, and what the next call needs.

        Args:
          theta: weights.
          x: the chunk, a multiple of four frames; only the last one may have padding.
          before: [B, 0, input_dim] for the first chunk, or the result of the call before.
          ctx: step context.

        Shapes:
          x: features [B, T, input_dim]
          returns: features [B, T / 4, output_dim]; [B, 4, input_dim]
        """
        known = before.shape[1]
        both = FrameSequence(tf.concat([before, x.features], 1), x.lengths + known)
        # Frame t of the output needs frames 4 t - 3 to 4 t + 3, so the first one is incomplete.
        frames, drop = self.fprop(theta, both, ctx), known // 4
        return (
            FrameSequence(frames.features[:, drop:], frames.lengths - drop),
            x.features[:, -4:],
        )


def _halved(num_frames: Any) -> Any:
    """Returns the frames after a convolution of stride 2: half of them, rounded up."""
    return (num_frames + 1) // 2


class SpeechEncoder(Layer):
    """Base of the encoders; a subclass defines `output_dim`, `num_frames` and `pieces`.

    Shapes:
      x: features [B, T, input_dim]
      returns: features [B, T', output_dim]
    """

    class Params(Layer.Params):
        """Params of an encoder."""

        input_dim: int = param("Number of features.", default=REQUIRED)

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        raise NotImplementedError(f"{type(self).__name__} has no output_dim")

    def num_frames(self, num_frames: Any) -> Any:
        """Returns the lengths of the output, T', for lengths T of the input.

        The task computes the loss weight from it, before the model runs.

        Shapes:
          num_frames, returns: any, the same; int, array or tensor
        """
        raise NotImplementedError(f"{type(self).__name__} has no num_frames()")

    @property
    def reduction(self) -> int:
        """Frames of the input for each frame of the output, T / T'."""
        long = 1 << 16
        return round(long / int(self.num_frames(long)))

    def fprop(self, theta: Theta, x: FrameSequence, ctx: StepContext) -> FrameSequence:
        """Runs the pieces one after the other; see the class."""
        flow: Flow = {FEATURES: x.features, LENGTHS: x.lengths}
        for piece in self.pieces():
            flow = piece.run(theta, flow, ctx)
        return frames_of(flow)

    def pieces(self) -> list[Piece]:
        """Returns the parts of the encoder; each replaces the frames of the flow."""
        raise NotImplementedError(f"{type(self).__name__} has no pieces()")

    # --- chunk by chunk; all chunks together give the same result as `fprop` ---

    @property
    def stream_frames(self) -> int:
        """Frames of the output in a chunk of a stream.

        Raises:
          StreamError: an output depends on the whole utterance.
        """
        raise StreamError(f"{type(self).__name__} needs whole utterances")

    def stream_start(self, batch_size: int) -> Any:
        """Returns the state before the first chunk."""
        raise NotImplementedError(f"{type(self).__name__} has no stream_start()")

    def stream(
        self, theta: Theta, x: FrameSequence, state: Any, ctx: StepContext
    ) -> tuple[FrameSequence, Any]:
        """Returns the output of the next chunk, without dropout, and the next state.

        Shapes:
          x: features [B, T, input_dim], where T is stream_frames * reduction; padding only in the
            last chunk
          returns: features [B, stream_frames, output_dim]
        """
        raise NotImplementedError(f"{type(self).__name__} has no stream()")


class StreamError(ValueError):
    """A model cannot transcribe a stream, because it needs whole utterances."""


STREAM_FRAMES = 8
"""Frames in a chunk of a stream, if the encoder is the same with any number."""


def frames_of(flow: Flow) -> FrameSequence:
    """Returns the frames of a flow."""
    return FrameSequence(flow[FEATURES], flow[LENGTHS])


def with_frames(flow: Flow, frames: FrameSequence) -> Flow:
    """Returns a flow with other frames."""
    return {**flow, FEATURES: frames.features, LENGTHS: frames.lengths}


class RecurrentEncoder(SpeechEncoder):
    """Convolutions that make the sequence four times shorter, and bidirectional LSTM layers.

    Shapes:
      x: features [B, T, input_dim]
      returns: features [B, ceil(T / 4), output_dim]
    Weights:
      subsampling/…, those of ConvSubsampling; stack/…, those of RecurrentStack
    Source: Chan et al. 2016 and Lingvo, tasks/asr/encoder.py, without batch normalisation.
    """

    class Params(SpeechEncoder.Params):
        """Params of RecurrentEncoder."""

        num_filters: int = param("Outputs of each convolution.", default=32)
        stack: RecurrentStack.Params = param(
            "The recurrent layers; their input_dim is that of the subsampling's output.",
            default=RecurrentStack.Params(
                num_layers=4,
                direction="bidirectional",
                cell=LstmCell.Params(hidden_dim=1024),
            ),
        )
        dim: int = param("Size of the input of the recurrent layers.", default=256)
        dropout_rate: float = param("Dropout of the output.", default=0.0)

    subsampling: ConvSubsampling
    stack: RecurrentStack
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child(
            "subsampling",
            ConvSubsampling.Params(
                input_dim=p.input_dim, output_dim=p.dim, num_filters=p.num_filters
            ),
        )
        self.child("stack", with_sizes(p.stack, input_dim=p.dim))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return self.stack.output_dim

    def num_frames(self, num_frames: Any) -> Any:
        """See `SpeechEncoder`."""
        return self.subsampling.num_frames(num_frames)

    def pieces(self) -> list[Piece]:
        """Returns the subsampling and one piece per recurrent layer."""

        def subsample(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return with_frames(
                flow, self.subsampling.fprop(theta.subsampling, frames_of(flow), ctx)
            )

        def layer(index: int) -> Piece:
            def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
                frames = frames_of(flow)
                y = self.stack.fprop_layer(
                    index, theta.stack, frames.features, ctx, mask=frames.mask
                )
                if index == len(self.stack.layers) - 1:
                    y = self.dropout.fprop(Theta(), y, ctx)
                return with_frames(flow, frames.with_features(y))

            path = f"stack/layers/{index}"
            return Piece(path, {path: self.stack.layers[index]}, run)

        first = Piece("subsampling", {"subsampling": self.subsampling}, subsample)
        return [first, *map(layer, range(len(self.stack.layers)))]

    @property
    def stream_frames(self) -> int:
        """See `SpeechEncoder`.

        Raises:
          StreamError: the layers are bidirectional.
        """
        if self.params.stack.direction != "forward":
            raise StreamError(
                f"{self.params.stack.path_of('direction')} is {self.params.stack.direction}: only "
                "'forward' needs no later frames"
            )
        return STREAM_FRAMES

    def stream_start(self, batch_size: int) -> Any:
        """See `SpeechEncoder`."""
        return {
            "before": tf.zeros([batch_size, 0, self.params.input_dim]),
            "stack": self.stack.zero_state(batch_size),
        }

    def stream(
        self, theta: Theta, x: FrameSequence, state: Any, ctx: StepContext
    ) -> tuple[FrameSequence, Any]:
        """See `SpeechEncoder`."""
        frames, before = self.subsampling.stream(theta.subsampling, x, state["before"], ctx)
        y, stack = self.stack.extend_step(theta.stack, frames.features, state["stack"], ctx)
        return frames.with_features(y), {"before": before, "stack": stack}
