"""Speech of TFDS: a data set that is prepared in a temporary folder; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import tensorflow_datasets as tfds

from tekso.framework.input.errors import InputError
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.tfds_speech import TfdsSpeech

TEXTS = ["Bad!", "Cab.", "(beep)", "Face?"]
SAMPLES = [np.rint(asterisk_folder.tones_of(t.lower()) * 32_767).astype(np.int64) for t in TEXTS]


class TinySpeech(tfds.core.GeneratorBasedBuilder):
    """Three utterances, and a record without words."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # there is no folder of checksums beside this file

    def _info(self) -> Any:
        features = {
            "speech": tfds.features.Audio(sample_rate=8000),
            "unrated": tfds.features.Audio(),
            "text": tfds.features.Text(),
            "word": tfds.features.ClassLabel(names=["yes", "no"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager: Any) -> dict[str, Any]:
        return {"train": self._generate()}

    def _generate_examples(self) -> None:
        raise NotImplementedError

    def _generate(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, (samples, text) in enumerate(zip(SAMPLES, TEXTS, strict=True)):
            yield i, {"speech": samples, "unrated": samples, "text": text, "word": i % 2}


@pytest.mark.parametrize("form", ["tfrecord", "array_record"])
def test_utterances_are_read_and_records_without_words_are_skipped(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # TensorFlow would look for a cloud to be in
    TinySpeech(data_dir=str(tmp_path), file_format=form).download_and_prepare()
    corpus = TfdsSpeech.Params(name="tiny_speech", data_dir=str(tmp_path))
    params = BucketedSpeech.Params(
        corpus=corpus, sample_rate=8000, max_seconds=1.0, batch_size=2, order="once"
    )
    wanted = {"bad": 0, "cab": 1, "face": 3}
    for keep in ("memory", "cache", "files"):
        input: Any = params.copy().set(keep=keep, cache_dir=str(tmp_path / "cache")).instantiate()
        assert {input.text(i) for i in range(3)} == set(wanted)
        for i in range(3):
            np.testing.assert_allclose(
                input.samples(i), SAMPLES[wanted[input.text(i)]] / 32_768, atol=1e-6
            )
        (skip,) = input.skipped().named
        assert skip.unit == "record" and skip.reason == "no words in the transcript '(beep)'"
    words = corpus.copy().set(text_feature="word").instantiate()
    assert {record.text for _, record in words.records()} == {"yes", "no"}
    for change, reason in (
        ({"feature": "speech"}, "feature is 'speech', must be empty: of this data set, whole"),
        ({"audio_feature": "audio"}, "no feature 'audio', only speech, text, unrated, word"),
        ({"audio_feature": "unrated"}, "does not say how many samples per second 'unrated' has"),
    ):
        with pytest.raises(InputError, match=reason):
            corpus.copy().set(change).instantiate()
