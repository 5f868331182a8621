"""Encoders chunk by chunk: the same as for the whole utterance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.conformer import Conformer
from tekso.models.layers.conformer_block import ConformerBlock, ConvolutionModule
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.pyramidal_encoder import PyramidalEncoder
from tekso.models.speech_encoder import RecurrentEncoder, SpeechEncoder, StreamError

CHANNELS = 5
CHUNKED = Conformer.Params(
    input_dim=CHANNELS,
    dim=6,
    num_layers=2,
    chunk_frames=2,
    left_chunks=2,
    block=ConformerBlock.Params(
        num_heads=2, convolution=ConvolutionModule.Params(kernel_size=4, padding="causal")
    ),
)
FORWARD = RecurrentEncoder.Params(
    input_dim=CHANNELS,
    num_filters=2,
    dim=6,
    stack=RecurrentStack.Params(num_layers=2, cell=LstmCell.Params(hidden_dim=5)),
)


def randomized(layer: SpeechEncoder) -> Any:
    rng = np.random.default_rng(1)
    return tf.nest.map_structure(
        lambda w: tf.constant(np.abs(rng.normal(0, 0.4, w.shape)).astype(np.float32)),
        layer.init(seed=0),
    )


def in_chunks(encoder: SpeechEncoder, theta: Any, x: np.ndarray) -> np.ndarray:
    """Returns the output for one utterance [1, T, C], [frames, output_dim]."""
    size, found = encoder.stream_frames * encoder.reduction, []
    state = encoder.stream_start(1)
    for begin in range(0, x.shape[1], size):
        own = x[:, begin : begin + size]
        missing = size - own.shape[1]
        chunk = np.pad(own, [(0, 0), (0, missing), (0, 0)], constant_values=9.0)
        frames, state = encoder.stream(
            theta,
            FrameSequence(tf.constant(chunk), tf.constant([size - missing])),
            state,
            StepContext(mode="decode"),
        )
        found.append(frames.features[0, : int(frames.lengths[0])])
    return np.concatenate(found)


@pytest.mark.parametrize("params", [CHUNKED, FORWARD], ids=["conformer", "lstm"])
@pytest.mark.parametrize("length", [71, 64, 3])
def test_chunks_together_equal_the_whole(params: Any, length: int) -> None:
    encoder: SpeechEncoder = params.instantiate()
    theta = randomized(encoder)
    x = np.random.default_rng(2).normal(size=(1, length, CHANNELS)).astype(np.float32)
    whole = FrameSequence(tf.constant(x), tf.constant([length]))
    expected = encoder.fprop(theta, whole, StepContext(mode="decode")).features[0]
    found = in_chunks(encoder, theta, x)
    assert found.shape == expected.shape == (-(-length // 4), encoder.output_dim)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("params", [CHUNKED, FORWARD], ids=["conformer", "lstm"])
def test_chunks_in_bfloat16_equal_the_whole(params: Any) -> None:
    encoder: SpeechEncoder = params.instantiate()
    theta = tf.nest.map_structure(lambda w: tf.cast(w, tf.bfloat16), randomized(encoder))
    x = np.random.default_rng(2).normal(size=(1, 40, CHANNELS)).astype(np.float32)
    whole = FrameSequence(tf.constant(x), tf.constant([40]))
    expected = encoder.fprop(theta, whole, StepContext(mode="decode")).features[0]
    found = in_chunks(encoder, theta, x)
    assert found.dtype == expected.dtype == tf.bfloat16
    np.testing.assert_allclose(
        found.astype(np.float32), tf.cast(expected, tf.float32), rtol=0.05, atol=0.05
    )


def test_a_chunk_depends_on_no_later_frame_and_on_a_limited_number_of_earlier_ones() -> None:
    narrow = {"num_layers": 1, "block.convolution.kernel_size": 1}
    encoder: Any = CHUNKED.copy().set(narrow).instantiate()
    theta, length = randomized(encoder), 80
    x = np.random.default_rng(2).normal(size=(1, length, CHANNELS)).astype(np.float32)

    def output(x: np.ndarray) -> np.ndarray:
        frames = FrameSequence(tf.constant(x), tf.constant([length]))
        return np.asarray(encoder.fprop(theta, frames, StepContext()).features[0])

    before, changed = output(x), x.copy()
    changed[:, 40] += 5.0  # seen by frame 10 of the output, the first of chunk 5
    differs = np.flatnonzero(np.abs(output(changed) - before).max(1) > 1e-6)
    assert differs.min() == 10 and differs.max() == 15  # the last of two chunks later


def test_what_needs_whole_utterances_says_so() -> None:
    for params, reason in (
        (CHUNKED.copy().set(chunk_frames=None), "chunk_frames is not set"),
        (FORWARD.copy().set({"stack.direction": "bidirectional"}), "is bidirectional: only"),
        (PyramidalEncoder.Params(input_dim=CHANNELS), "PyramidalEncoder needs whole utterances"),
    ):
        with pytest.raises(StreamError, match=reason):
            _ = params.instantiate().stream_frames
    with pytest.raises(ValueError, match=r"padding must be 'causal', not 'same'"):
        CHUNKED.copy().set({"block.convolution.padding": "same"}).instantiate()
