"""The speech model: the number of frames that it announces is the number that it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.conformer import Conformer
from tekso.models.ctc_model import CtcModel
from tekso.models.layers.conformer_block import ConformerBlock
from tekso.models.layers.log_mel import LogMel, kaldi_log_mel
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.speech_encoder import RecurrentEncoder

LENGTHS = np.arange(0, 2600, 7, np.int32)
LINGVO = LogMel.Params(sample_rate=8000, num_channels=8, fft_length=256, high_hz=3800.0)
RECURRENT = RecurrentEncoder.Params(
    num_filters=1,
    dim=2,
    stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=2)),
)
CONFORMER = Conformer.Params(
    dim=4, num_layers=1, block=ConformerBlock.Params(num_heads=1, dropout_rate=0.0)
)


@pytest.mark.parametrize(
    ("front_end", "encoder", "needed"),
    [
        (LINGVO, RECURRENT, 201),  # 25 ms and the sample before
        (kaldi_log_mel(sample_rate=8000, num_channels=8), CONFORMER, 200),
    ],
)
def test_frames_are_known_before_the_model_runs(front_end: Any, encoder: Any, needed: int) -> None:
    model: CtcModel = CtcModel.Params(
        vocab_size=2, front_end=front_end, encoder=encoder
    ).instantiate()
    samples = np.zeros([len(LENGTHS), LENGTHS[-1]], np.float32)
    found = model.fprop(
        model.init(seed=1), tf.constant(samples), StepContext(), lengths=tf.constant(LENGTHS)
    )
    # Windows that fit, 10 ms apart; every second of these, and every second of those.
    windows = [len(range(0, length - needed + 1, 80)) for length in LENGTHS.tolist()]
    wanted = [len(range(0, len(range(0, n, 2)), 2)) for n in windows]
    assert len(set(wanted)) > 7
    np.testing.assert_array_equal(found.lengths, wanted)
    np.testing.assert_array_equal(model.num_frames(LENGTHS), wanted)
    np.testing.assert_array_equal(model.num_frames(tf.constant(LENGTHS)), wanted)
    assert [int(model.num_frames(n)) for n in LENGTHS.tolist()] == wanted
