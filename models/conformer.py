"""The Conformer encoder: convolutions that shorten the sequence, then blocks."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Normal
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.conformer_block import ConformerBlock
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.sizes import with_sizes
from tekso.models.speech_encoder import (
    ConvSubsampling,
    SpeechEncoder,
    StreamError,
    frames_of,
    with_frames,
)


class Conformer(SpeechEncoder):
    """Two convolutions of stride 2 and a projection, then Conformer blocks.

    With `chunk_frames`, a frame depends on no later chunk, so that a stream can be transcribed
    while it arrives: in self-attention, it sees its own chunk and `left_chunks` chunks before.

    SpecAugment sets whole spans of normalised features to 0. There, the first layer norm of a block
    gets only the bias of the projection. If it began at 0, the norm would multiply gradients by
    1 / sqrt(epsilon) = 1,000, so it begins at random numbers (`bias_init`) that are a third to a
    fifth of the size of ordinary frames.

    Shapes:
      x: features [B, T, input_dim]
      returns: features [B, ceil(T / 4), dim]
    Weights:
      subsampling/…, those of ConvSubsampling; blocks/0/…, blocks/1/…, …
    Source: Gulati et al. 2020.
    """

    class Params(SpeechEncoder.Params):
        """Params of Conformer."""

        dim: int = param("Size of the last dim of the output.", default=REQUIRED)
        num_layers: int = param("Number of blocks.", default=REQUIRED)
        block: ConformerBlock.Params = param("Every block.", default=ConformerBlock.Params())
        num_filters: int | None = param(
            "Outputs of each convolution that shortens the sequence. None: dim.", default=None
        )
        bias_init: Initializer.Params = param(
            "Initializer of the bias of the projection before the blocks; see the class.",
            default=Normal.Params(stddev=0.3),
        )
        dropout_rate: float = param("Dropout of the input of the first block.", default=0.0)
        chunk_frames: int | None = param(
            "Frames of the output in a chunk, for streams; block.convolution.padding must then be "
            "causal. None: a frame depends on the whole utterance.",
            default=None,
        )
        left_chunks: int = param("Chunks before its own that a frame attends to.", default=8)

    subsampling: ConvSubsampling
    blocks: list[ConformerBlock]
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_layers < 1:
            raise ValueError(f"Conformer: num_layers is {p.num_layers}, must be at least 1")
        if p.chunk_frames is not None:
            if p.chunk_frames < 1 or p.left_chunks < 0:
                raise ValueError(
                    f"Conformer: chunk_frames is {p.chunk_frames} and left_chunks is "
                    f"{p.left_chunks}, must be at least 1 and 0"
                )
            if p.block.convolution.padding != "causal":
                raise ValueError(
                    f"{p.path_of('chunk_frames')} is {p.chunk_frames}, so "
                    f"{p.path_of('block.convolution.padding')} must be 'causal', not "
                    f"{p.block.convolution.padding!r}"
                )
        self.child(
            "subsampling",
            ConvSubsampling.Params(
                input_dim=p.input_dim,
                output_dim=p.dim,
                num_filters=p.num_filters,
                bias_init=p.bias_init,
            ),
        )
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child_list("blocks", [with_sizes(p.block, dim=p.dim)] * p.num_layers)

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(self.params.dim)

    def num_frames(self, num_frames: Any) -> Any:
        """See `SpeechEncoder`."""
        return self.subsampling.num_frames(num_frames)

    def pieces(self) -> list[Piece]:
        """Returns the subsampling and one piece per block."""

        def subsample(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            frames = self.subsampling.fprop(theta.subsampling, frames_of(flow), ctx)
            x = self.dropout.fprop(Theta(), frames.features, ctx)
            return with_frames(flow, frames.with_features(x))

        def block(index: int) -> Piece:
            def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
                frames, own = frames_of(flow), theta.blocks[str(index)]
                visible = self._visible(frames.features.shape[1])
                y = self.blocks[index].fprop(
                    own, frames.features, ctx.fold(index), mask=frames.mask, visible=visible
                )
                return with_frames(flow, frames.with_features(y))

            path = f"blocks/{index}"
            return Piece(path, {path: self.blocks[index]}, run)

        first = Piece("subsampling", {"subsampling": self.subsampling}, subsample)
        return [first, *map(block, range(len(self.blocks)))]

    def _visible(self, length: int) -> np.ndarray | None:
        """Returns which frames [length, length] a frame attends to; None: all."""
        if self.params.chunk_frames is None:
            return None
        chunk = np.arange(length) // self.params.chunk_frames
        before = chunk[:, None] - chunk[None]
        found: np.ndarray = (before >= 0) & (before <= self.params.left_chunks)
        return found

    @property
    def stream_frames(self) -> int:
        """See `SpeechEncoder`.

        Raises:
          StreamError: chunk_frames is not set.
        """
        if self.params.chunk_frames is None:
            raise StreamError(
                f"{self.params.path_of('chunk_frames')} is not set, so every frame depends on the "
                "whole utterance"
            )
        return int(self.params.chunk_frames)

    def stream_start(self, batch_size: int) -> Any:
        """See `SpeechEncoder`."""
        frames = self.stream_frames * self.params.left_chunks
        return {
            "before": tf.zeros([batch_size, 0, self.params.input_dim]),
            "blocks": [block.stream_start(batch_size, frames) for block in self.blocks],
        }

    def stream(
        self, theta: Theta, x: FrameSequence, state: Any, ctx: StepContext
    ) -> tuple[FrameSequence, Any]:
        """See `SpeechEncoder`."""
        frames, before = self.subsampling.stream(theta.subsampling, x, state["before"], ctx)
        after = []
        for i, (block, own) in enumerate(zip(self.blocks, state["blocks"], strict=True)):
            y, next_ = block.stream(
                theta.blocks[str(i)], frames.features, own, ctx, mask=frames.mask
            )
            frames = frames.with_features(y)
            after.append(next_)
        return frames, {"before": before, "blocks": after}


Size = Literal["S", "M", "L"]


def conformer(size: Size, *, dropout_rate: float = 0.1) -> Conformer.Params:
    """Returns Params of a published size.

    Source: Gulati et al. 2020, table 1. Trained weights with 80 features: S 8,713,152,
      M 27,331,584, L 115,120,128; the paper's numbers include the decoder of its transducer.
    """
    num_layers, dim, num_heads = {"S": (16, 144, 4), "M": (16, 256, 4), "L": (17, 512, 8)}[size]
    return Conformer.Params(
        dim=dim,
        num_layers=num_layers,
        dropout_rate=dropout_rate,
        block=ConformerBlock.Params(num_heads=num_heads, dropout_rate=dropout_rate),
    )
