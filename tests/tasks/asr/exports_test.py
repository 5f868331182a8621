"""Exported recognisers: samples in, the log-probabilities of `predict` out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from speech_tasks import TASKS

from tekso.framework.context import StepContext
from tekso.framework.run import litert, saved_model
from tekso.models.conformer import Conformer
from tekso.models.ctc_model import CtcModel
from tekso.models.layers.conformer_block import ConformerBlock
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.speech_encoder import RecurrentEncoder
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.sources import AsteriskPrompts
from tekso.tasks.asr.task import CtcTask

RNG = np.random.default_rng(1)
TONES = [asterisk_folder.tones_of(text) for text in ("ab", "fade", "c")]
# Noise, because in channels without power the logarithm magnifies rounding in the FFT.
RECORDINGS = [x + RNG.normal(0, 0.01, x.shape).astype(np.float32) for x in TONES]


class Data:
    """Params of an input whose longest utterance has 0.6 seconds."""

    params = BucketedSpeech.Params(
        corpus=AsteriskPrompts.Params(), sample_rate=8000, max_seconds=0.6, batch_size=2
    )


RECURRENT = RecurrentEncoder.Params(
    num_filters=2,
    dim=6,
    stack=RecurrentStack.Params(
        num_layers=1, direction="bidirectional", cell=LstmCell.Params(hidden_dim=4)
    ),
)
CONFORMER = Conformer.Params(dim=8, num_layers=1, block=ConformerBlock.Params(num_heads=2))
ENCODERS = pytest.mark.parametrize("encoder", [RECURRENT, CONFORMER], ids=["lstm", "conformer"])


def task_of(encoder: Any) -> tuple[CtcTask, dict[str, np.ndarray]]:
    """Returns a small task and its weights."""
    model = CtcModel.Params(
        vocab_size=5,
        front_end=LogMel.Params(sample_rate=8000, num_channels=8, fft_length=256, high_hz=3800.0),
        encoder=encoder,
    )
    task: CtcTask = CtcTask.Params(model=model, scoring=None).instantiate()
    return task, {path: spec.initial_value(3) for path, spec in task.specs().items()}


def padded(recordings: list[np.ndarray], length: int) -> dict[str, np.ndarray]:
    samples = np.zeros([len(recordings), length], np.float32)
    for row, own in zip(samples, recordings, strict=True):
        row[: len(own)] = own
    return {"samples": samples, "num_samples": np.array([*map(len, recordings)], np.int32)}


def alone(task: Any, weights: Any, recording: np.ndarray) -> np.ndarray:
    """Returns what the task predicts for a recording without padding, [frames, tokens]."""
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    given = {n: tf.constant(a) for n, a in padded([recording], len(recording)).items()}
    found = task.predict(theta, given, StepContext(mode="decode"))
    return np.asarray(found["log_probs"][0, : found["num_frames"][0]])


@ENCODERS
@pytest.mark.slow
def test_an_exported_model_recognises_as_predict_does(encoder: Any, tmp_path: Path) -> None:
    task, weights = task_of(encoder)
    module = saved_model.ExportModule(task, weights, seed=0)
    exports = task.exports(Data())  # type: ignore[arg-type]
    saved_model.write(
        str(tmp_path / "out"), module, exports, batch_size=2, about={}, assets={}, texts={}
    )
    loaded = tf.saved_model.load(str(tmp_path / "out")).signatures["recognize"]
    given = padded(RECORDINGS, max(map(len, RECORDINGS)))  # shorter than the longest
    found = loaded(**{name: tf.constant(array) for name, array in given.items()})
    for recording, log_probs, frames in zip(
        RECORDINGS, found["log_probs"].numpy(), found["num_frames"].numpy(), strict=True
    ):
        wanted = alone(task, weights, recording)
        assert frames == len(wanted) > 2
        np.testing.assert_allclose(log_probs[:frames], wanted, atol=1e-4)  # float32


@ENCODERS
@pytest.mark.slow
def test_litert_recognises_as_predict_does(encoder: Any) -> None:
    task, weights = task_of(encoder)
    module = saved_model.ExportModule(task, weights, seed=0)
    exported = task.exports(Data())["recognize"]  # type: ignore[arg-type]
    assert exported.for_litert
    data = litert.convert(module, exported)
    recognize = tf.lite.Interpreter(model_content=data).get_signature_runner()
    found = recognize(**padded(RECORDINGS[:1], 4800))
    wanted = alone(task, weights, RECORDINGS[0])
    np.testing.assert_allclose(found["log_probs"][0, : len(wanted)], wanted, atol=1e-4)
    assert found["num_frames"] == [len(wanted)]


LITERT = [("transducer", "recognize"), ("las", "recognize"), ("las", "greedy")]


def searched(kind: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a small transducer or LAS whose weights are large, and its weights.

    The search of LAS has CTC scores, whose ops are then exported too.
    """
    changes = {"model.vocab_size": 5, "model.encoder": RECURRENT, "scoring": None}
    if kind == "las":
        changes |= {"transcriber.search.beam_size": 3, "transcriber.num_hypotheses": 2}
        changes |= {"transcriber.ctc_weight": 0.3, "model.ctc_weight": 0.3}
        changes["transcriber.search.max_length"] = 6
    task: Any = TASKS[kind](**changes).instantiate()
    return task, {path: 4 * spec.initial_value(3) for path, spec in task.specs().items()}


def transcripts_alone(task: Any, weights: Any, recording: np.ndarray, *, greedy: bool) -> Any:
    """Returns the tokens of the best transcript, by the transcriber of the task."""
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    transcriber = task.transcriber
    if greedy and "search" in transcriber.params:
        params = transcriber.params.copy().set(num_hypotheses=1)
        params.search.set(beam_size=1, length_normalization=0.0)
        transcriber = params.instantiate(model=task.model)
    (found,) = transcriber.transcripts(
        EagerProgram(theta), recording[None], np.array([len(recording)], np.int32)
    )
    return found[0]


def tokens_of(task: Any, ids: np.ndarray, length: int) -> list[int]:
    """Returns the tokens of an exported function without the end token."""
    found: list[int] = ids[:length].tolist()
    end = getattr(task.model, "end_id", None)
    return found[:-1] if found and found[-1] == end else found


@pytest.mark.parametrize("kind", ["transducer", "las"])
@pytest.mark.slow
def test_exported_searches_find_what_the_transcriber_finds(kind: str, tmp_path: Path) -> None:
    task, weights = searched(kind)
    module = saved_model.ExportModule(task, weights, seed=0)
    exports = task.exports(Data())
    saved_model.write(
        str(tmp_path / "out"), module, exports, batch_size=2, about={}, assets={}, texts={}
    )
    signatures = tf.saved_model.load(str(tmp_path / "out")).signatures
    given = padded(RECORDINGS, max(map(len, RECORDINGS)))
    inputs = {name: tf.constant(array) for name, array in given.items()}
    some = 0
    for name in exports:
        found = {key: value.numpy() for key, value in signatures[name](**inputs).items()}
        if kind == "las":  # the best of the transcripts
            found = {key: value[:, 0] for key, value in found.items()}
        for i, recording in enumerate(RECORDINGS):
            best = transcripts_alone(task, weights, recording, greedy=name == "greedy")
            assert tokens_of(task, found["ids"][i], found["lengths"][i]) == list(best.labels)
            assert found["log_probs"][i] == pytest.approx(best.log_prob, abs=1e-3)
            some += len(best.labels)
    assert some > 5


@pytest.mark.parametrize(("kind", "name"), LITERT)
@pytest.mark.slow
def test_litert_finds_what_the_transcriber_finds(kind: str, name: str) -> None:
    task, weights = searched(kind)
    module = saved_model.ExportModule(task, weights, seed=0)
    exported = task.exports(Data())[name]
    assert exported.for_litert
    data = litert.convert(module, exported)
    recognize = tf.lite.Interpreter(model_content=data).get_signature_runner()
    finished = []
    for recording in RECORDINGS:
        found = recognize(**padded([recording], 4800))
        ids, lengths, log_probs = (found[key] for key in ("ids", "lengths", "log_probs"))
        if kind == "las":  # the best of the transcripts
            ids, lengths, log_probs = ids[:, 0], lengths[:, 0], log_probs[:, 0]
            finished.append(bool(found["is_finished"][0, 0]))
        best = transcripts_alone(task, weights, recording, greedy=name == "greedy")
        assert tokens_of(task, ids[0], int(lengths[0])) == list(best.labels) != []
        assert log_probs[0] == pytest.approx(best.log_prob, abs=1e-3)
    if name == "recognize" and kind == "las":  # both kinds of hypotheses
        assert set(finished) == {True, False}
