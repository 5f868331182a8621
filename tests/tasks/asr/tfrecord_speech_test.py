"""Speech in TFRecords: audio files and samples, transcripts, and records that are broken."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import soundfile
import tensorflow as tf
from speech_tasks import task_params

from tekso.framework.input.errors import InputError
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.tfrecord_speech import TfRecordSpeech

TEXTS = ["bad", "cab", "a", "face"]
TONES = [asterisk_folder.tones_of(text) for text in TEXTS]


def example(audio: Any, text: Any = b"Bad!", audio_name: str = "audio") -> bytes:
    def feature(value: Any) -> tf.train.Feature:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        if np.asarray(value).dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=value))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

    features = {audio_name: feature(audio), "transcript": feature(text)}
    serialised: bytes = tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()
    return serialised


def write(path: Path, records: list[bytes]) -> str:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def as_file(samples: np.ndarray) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples, 8000, format="FLAC")
    return stream.getvalue()


def params(path: str, **changes: Any) -> Any:
    corpus = TfRecordSpeech.Params(files=path, dev_fraction=0.0).set(changes)
    return BucketedSpeech.Params(
        corpus=corpus, sample_rate=8000, max_seconds=1.0, batch_size=2, order="once"
    )


INT16 = [np.rint(x * 32_767).astype(np.int16) for x in TONES]
FORMS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "file": ([as_file(x) for x in TONES], {}),
    "bytes": ([x.astype("<i2").tobytes() for x in INT16], {"encoding": "int16"}),
    "integers": ([x.tolist() for x in INT16], {}),
    "floats": (list(TONES), {}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", ["memory", "cache", "files"])
def test_every_form_of_recording_gives_the_same_utterances(
    form: str, keep: str, tmp_path: Path
) -> None:
    recordings, changes = FORMS[form]
    if form != "file":
        changes = {**changes, "sample_rate": 8000}
    records = [example(x, t.encode()) for x, t in zip(recordings, TEXTS, strict=True)]
    given = params(write(tmp_path / "a.tfrecord", records), **changes)
    given.set(keep=keep, cache_dir=str(tmp_path / "cache"))
    input: Any = given.instantiate()
    assert [input.text(i) for i in range(4)] == TEXTS
    assert len({input.origin(i) for i in range(4)}) == 4 and input.audio_file(0) is None
    assert task_params(**{"model.vocab_size": 6}).instantiate().setting_to_try({"d": input}) is None
    for i, tones in enumerate(TONES):
        np.testing.assert_allclose(input.samples(i), tones, atol=1e-4)
    batch = input.batch(0)
    assert batch["num_samples"][0] == len(TONES[2]) and batch["weights"].tolist() == [1, 0]


def test_broken_records_are_named_counted_and_skipped(tmp_path: Path) -> None:
    records = [
        example(as_file(TONES[0])),
        example(b"RIFF"),
        example(b""),
        example(as_file(TONES[0]), b"(noise)"),
        example(as_file(TONES[0]), b"\xff"),
        example(as_file(TONES[0]), audio_name="speech"),
        b"no example",
    ]
    input: Any = params(write(tmp_path / "a.tfrecord", records)).instantiate()
    assert input.num_examples == 1
    found = sorted(skip.reason for skip in input.skipped().named)
    wanted = [
        "'transcript': ",
        "an empty file",
        "no words in the transcript '(noise)'",
        "not audio",
        "the record has no feature 'audio', only: speech, transcript",
        "the record is not a tf.train.Example",
    ]
    assert len(found) == 6
    for reason, start in zip(found, wanted, strict=True):
        assert reason.startswith(start)


def test_wrong_samples_and_settings_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [example([1, 2]), example([40_000]), example([3, 4])])
    with pytest.raises(InputError, match=r"byte 0: 'audio' has samples: set .*sample_rate to"):
        params(path).instantiate()
    (skip,) = params(path, sample_rate=8000).instantiate().skipped().named
    assert "numbers that are not 16-bit" in skip.reason
    odd = write(tmp_path / "b.tfrecord", [example(b"abc"), example(b"ab")])
    (skip,) = params(odd, sample_rate=8000, encoding="int16").instantiate().skipped().named
    assert "has 3 bytes, which are no 16-bit samples" in skip.reason
