"""PyramidalEncoder: bidirectional layers, each of which halves the number of frames.

Legend: B batch, T frames.
"""

from __future__ import annotations

from typing import Any

from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.frames import FrameSequence, StackFrames
from tekso.models.layers.recurrent import Bidirectional
from tekso.models.layers.recurrent_cells import LstmCell, RecurrentCell
from tekso.models.layers.sizes import with_sizes
from tekso.models.speech_encoder import SpeechEncoder, frames_of, with_frames


class PyramidalEncoder(SpeechEncoder):
    """A bidirectional layer, then pyramidal ones, whose input is two joined frames.

    Shapes:
      x: features [B, T, input_dim]
      returns: features [B, T / 2**num_pyramidal, 2 * output of the cell]; each halving rounds up
    Weights:
      layers/0/…, layers/1/…, …, those of Bidirectional
    Source: Chan et al. 2016, section 3.1.1.
    """

    class Params(SpeechEncoder.Params):
        """Params of PyramidalEncoder."""

        num_pyramidal: int = param("Layers that halve the number of frames.", default=3)
        cell: RecurrentCell.Params = param(
            "The cell of every direction; the encoder sets its input_dim.",
            default=LstmCell.Params(hidden_dim=256),
        )
        dropout_rate: float = param(
            "Dropout of the input of every layer but the first.", default=0.0
        )

    layers: list[Bidirectional]
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_pyramidal < 0:
            raise ValueError(
                f"PyramidalEncoder: num_pyramidal is {p.num_pyramidal}, must be at least 0"
            )
        layers = [Bidirectional.Params(cell=with_sizes(p.cell, input_dim=p.input_dim))]
        joined = 2 * layers[0].instantiate().output_dim
        for _ in range(p.num_pyramidal):
            layers.append(Bidirectional.Params(cell=with_sizes(p.cell, input_dim=joined)))
        self.child_list("layers", layers)
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self._pairs: StackFrames = StackFrames.Params(size=2).instantiate()

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return self.layers[-1].output_dim

    def num_frames(self, num_frames: Any) -> Any:
        """See `SpeechEncoder`.

        Shapes:
          num_frames, returns: any, the same
        """
        for _ in range(self.params.num_pyramidal):
            num_frames = (num_frames + 1) // 2
        return num_frames

    def pieces(self) -> list[Piece]:
        """Returns one piece per layer."""

        def layer(index: int) -> Piece:
            def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
                frames = self._input(index, frames_of(flow), ctx.fold(index))
                own = theta.layers[str(index)]
                y = self.layers[index].fprop(own, frames.features, ctx, mask=frames.mask)
                return with_frames(flow, frames.with_features(y))

            path = f"layers/{index}"
            return Piece(path, {path: self.layers[index]}, run)

        return [layer(index) for index in range(len(self.layers))]

    def _input(self, index: int, frames: FrameSequence, ctx: StepContext) -> FrameSequence:
        if index == 0:
            return frames
        x = self.dropout.fprop(Theta(), frames.features, ctx)
        return self._pairs.fprop(Theta(), frames.with_features(x), ctx)
