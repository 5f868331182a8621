"""Small LSTM encoder-decoders that could tell one execution from another, and pairs to learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.params import REQUIRED, Params, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.source_attention import DotAttention
from tekso.models.lstm_encoder_decoder import LstmEncoderDecoder

SOURCE_LENGTH, TARGET_LENGTH, VOCAB, DIM, UNITS = 6, 8, 32, 16, 16


class Pairs(Task):
    """Minimises the cross-entropy of the targets."""

    class Params(Task.Params):
        """Params of Pairs."""

        model: LstmEncoderDecoder.Params = param("The network.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("model", self.params.model)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["target_weights"])

    def pieces(self) -> list[Piece]:
        pieces = [piece.below("model") for piece in self.model.pieces(label_smoothing=0.1)]
        return [*pieces, Piece("loss", {}, self._sum)]

    def _sum(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        loss_sum = tf.reduce_sum(flow["target_weights"] * flow["cross_entropy"])
        return {**flow, LOSS_SUM: loss_sum, METRICS: {}}


def pairs(**changes: Any) -> Params:
    cell = LstmCell.Params(hidden_dim=UNITS)
    model = LstmEncoderDecoder.Params(
        source_vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        dim=DIM,
        encoder=RecurrentStack.Params(
            num_layers=2,
            cell=cell,
            direction="bidirectional_first",
            residual="add",
        ),
        decoder=RecurrentDecoder.Params(num_layers=2, cell=cell, residual="add", dropout_rate=0.1),
        dropout_rate=0.1,
    )
    return Pairs.Params(model=model.set(changes))


MODELS = {
    "pairs": pairs,
    "pairs_luong": lambda: pairs(
        **{"decoder.input_feeding": "attentional", "decoder.attention": DotAttention.Params()}
    ),
}


def batch(step: int, size: int) -> dict[str, np.ndarray]:
    """Rows of two pairs or of one, and padding."""
    rng = np.random.default_rng(step)

    def side(length: int) -> np.ndarray:
        first = rng.integers(2, length - 1, (size, 1))
        last = rng.integers(first + 1, length + 1)
        place = np.arange(length)
        two = np.arange(size)[:, None] % 2 == 0
        segments = np.where(place < first, 1, np.where(two & (place < last), 2, 0))
        return segments.astype(np.int32)

    target = rng.integers(0, VOCAB, (size, TARGET_LENGTH + 1)).astype(np.int32)
    segments = side(TARGET_LENGTH)
    return {
        "source_ids": rng.integers(0, VOCAB, (size, SOURCE_LENGTH)).astype(np.int32),
        "source_segment_ids": side(SOURCE_LENGTH),
        "target_ids": target[:, :-1],
        "target_labels": target[:, 1:],
        "target_segment_ids": segments,
        "target_weights": (segments > 0).astype(np.float32),
    }
