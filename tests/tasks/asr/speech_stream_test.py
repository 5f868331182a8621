"""Streams: a recording in pieces has the transcript of the whole recording."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from speech_tasks import TASKS, Letters

from tekso.framework.context import StepContext
from tekso.models.conformer import Conformer
from tekso.models.layers.conformer_block import ConformerBlock, ConvolutionModule
from tekso.models.layers.frames import NormalizeFrames
from tekso.tasks.asr.speech_stream import SpeechStream

CHUNKED = Conformer.Params(
    dim=6,
    num_layers=1,
    chunk_frames=3,
    left_chunks=1,
    block=ConformerBlock.Params(
        num_heads=2, convolution=ConvolutionModule.Params(kernel_size=3, padding="causal")
    ),
)

GLOBAL = NormalizeFrames.Params(statistics="global", mean=[10.0] * 20, deviation=[1.0] * 20)


def of_kind(kind: str, beam_size: int, encoder: Any = CHUNKED) -> tuple[Any, Any]:
    """Returns a transcriber with random weights, and what takes the place of its program."""
    beam = "transcriber.search.beam_size" if kind == "las" else "transcriber.beam_size"
    changes = {"model.vocab_size": 5, "model.normalize": GLOBAL, beam: beam_size}
    changes["transcriber.num_hypotheses"] = min(beam_size, 2)
    if encoder is not None:
        changes["model.encoder"] = encoder
    task: Any = TASKS[kind](**changes).instantiate()
    theta = tf.nest.map_structure(lambda w: 2.0 * w, task.init(seed=4))
    if kind == "ctc":  # centred scores, so that the best token changes from frame to frame
        encoded = task.model.encode(theta.model, recording(4000)[None], StepContext(), lengths=None)
        output = theta.model.output
        output["b"] = -tf.reduce_mean(encoded.features[0] @ output.w, 0)
    return task.transcriber, EagerProgram(theta)


def recording(num_samples: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    loudness = np.repeat(rng.uniform(0.001, 0.3, 1 + num_samples // 400), 400)[:num_samples]
    return (loudness * rng.normal(size=num_samples)).astype(np.float32)


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("kind", ["ctc", "transducer"])
def test_a_stream_has_the_record_of_the_whole_recording(kind: str, beam_size: int) -> None:
    transcriber, program = of_kind(kind, beam_size)
    samples = recording(5000 + 123)
    whole = transcriber.record(program, samples, Letters())
    stream = SpeechStream(program, transcriber, Letters())
    assert stream.waits_because is None
    partial = [stream.add(part) for part in np.split(samples, [100, 1900, 1901, 4000])]
    assert partial[0] is None and partial[3]  # the first piece is shorter than a chunk
    assert stream.seconds == pytest.approx(len(samples) / 8000)
    record = stream.finish()
    assert len(whole["text"]) > 3 and record["text"] == whole["text"]
    assert record["words"] == whole["words"]
    if beam_size > 1:
        for (text, nats), (other, own) in zip(
            record["hypotheses"], whole["hypotheses"], strict=True
        ):
            assert text == other and nats == pytest.approx(own, rel=1e-4)


@pytest.mark.parametrize("kind", ["ctc", "transducer"])
def test_a_stream_that_is_shorter_than_a_frame_has_an_empty_transcript(kind: str) -> None:
    transcriber, program = of_kind(kind, 1)
    stream = SpeechStream(program, transcriber, Letters())
    assert stream.add(recording(150)) is None
    assert stream.finish() == {"text": "", "words": []}


@pytest.mark.parametrize("kind", TASKS)
def test_a_model_that_needs_whole_utterances_waits_for_the_end(kind: str) -> None:
    transcriber, program = of_kind(kind, 2, encoder=CHUNKED if kind == "las" else None)
    stream = SpeechStream(program, transcriber, Letters())
    reason = "LasTranscriber needs whole" if kind == "las" else "direction is bidirectional"
    assert reason in str(stream.waits_because)
    samples = recording(2500)
    assert [stream.add(part) for part in np.split(samples, [2000])] == [None, None]
    assert stream.finish() == transcriber.record(program, samples, Letters())


def test_statistics_of_an_utterance_are_not_known_in_a_stream() -> None:
    task: Any = TASKS["ctc"](**{"model.vocab_size": 5, "model.encoder": CHUNKED}).instantiate()
    stream = SpeechStream(EagerProgram(None), task.transcriber, Letters())  # type: ignore[arg-type]
    assert "statistics is 'utterance': set 'global'" in str(stream.waits_because)
