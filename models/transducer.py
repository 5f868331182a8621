"""A speech recogniser with a transducer (RNN-T): its output depends on the labels before.

Legend: B batch, N samples, T frames of the encoder's output, U labels, R = U + 1.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.transducer_layers import Joint, PredictionNetwork
from tekso.models.speech_encoder import frames_of
from tekso.models.speech_model import SpeechModel

PREDICTED = "predicted"
BLANK, LABEL = "blank_log_probs", "label_log_probs"
"""Names of what the model adds to the flow of pieces."""


class Transducer(SpeechModel):
    """Front end, encoder, prediction network over the labels, and joint network.

    Shapes:
      x: {"samples" [B, N], "num_samples" [B], "labels" [B, U]}
      returns: log-probabilities of the blank and of the next label, [B, T, R] float32 each
    Weights:
      encoder/…, prediction/…, joint/…
    Source: Graves 2012; Graves, Mohamed & Hinton 2013.
    """

    class Params(SpeechModel.Params):
        """Params of Transducer."""

        prediction: PredictionNetwork.Params = param(
            "The network over the labels; its vocab_size is that of the model.",
            default=PredictionNetwork.Params(),
        )
        joint: Joint.Params = param(
            "Joins both; the model sets its sizes, except its hidden units.",
            default=Joint.Params(),
        )

    prediction: PredictionNetwork
    joint: Joint

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("prediction", with_sizes(p.prediction, vocab_size=p.vocab_size))
        sizes = {
            "vocab_size": p.vocab_size,
            "encoded_dim": self.encoder.output_dim,
            "predicted_dim": self.prediction.output_dim,
        }
        self.child("joint", with_sizes(p.joint, **sizes))

    @property
    def blank_id(self) -> int:
        """Token of the blank."""
        return int(self.params.vocab_size)

    def fprop(self, theta: Theta, x: Flow, ctx: StepContext) -> tuple[tf.Tensor, tf.Tensor]:
        """See the class."""
        flow = x
        for piece in self.pieces():
            flow = piece.run(theta, flow, ctx)
        return flow[BLANK], flow[LABEL]

    def pieces(self) -> list[Piece]:
        """Returns the encoder's pieces, the prediction network and the joint network."""

        def predict(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            y = self.prediction.fprop(theta.prediction, flow["labels"], ctx)
            return {**flow, PREDICTED: y}

        def join(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            encoded = frames_of(flow).features
            predicted, labels = flow[PREDICTED], flow["labels"]
            blank, label = self.joint.log_probs(theta.joint, encoded, predicted, labels, ctx)
            return {**flow, BLANK: blank, LABEL: label}

        return [
            *self.encoder_pieces(),
            Piece("prediction", {"prediction": self.prediction}, predict),
            Piece("joint", {"joint": self.joint}, join),
        ]
