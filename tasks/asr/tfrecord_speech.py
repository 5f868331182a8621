"""Speech in TFRecords: recordings and transcripts as features of tf.train.Examples."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.sources import digest
from tekso.framework.input.text import NotTextError, to_text
from tekso.framework.input.tfrecords import TfRecords, feature_of
from tekso.framework.params import param
from tekso.tasks.asr.utterances import AnySpeech, Utterance

Encoding = Literal["file", "int16"]


class TfRecordSpeech(TfRecords, AnySpeech):
    """One utterance per record: a tf.train.Example with a recording and its transcript.

    The recording is the bytes of an audio file (WAV, FLAC, OGG, MP3); or samples: a byte string of
    little-endian 16-bit integers, a list of 16-bit integers, or a list of floats in [-1, 1).

    Without dev_files, a share of the records is held out, not a share of the texts: if a sentence
    occurs in several records, give files for dev and test.
    """

    class Params(TfRecords.Params, AnySpeech.Params):
        """Params of TfRecordSpeech."""

        feature: str = param("The feature with the recording.", default="audio")
        text_feature: str = param("The feature with the transcript.", default="transcript")
        encoding: Encoding = param(
            "What a byte string is. file: an audio file. int16: samples.", default="file"
        )
        sample_rate: int | None = param(
            "Samples per second, if a record has samples. Audio files have their own.", default=None
        )

    def fingerprint(self) -> str:
        """Returns a digest of the records, and of how they are read."""
        p = self.params
        form = f"{p.text_feature} {p.encoding} {p.sample_rate}"
        return digest([super().fingerprint().encode(), form.encode()])

    def parse(self, record: bytes, origin: Origin) -> Utterance:
        """See `TfRecords`.

        Raises:
          InputError: a record has samples, but sample_rate is not set.
        """
        p = self.params
        audio = feature_of(record, p.feature, origin)
        text = feature_of(record, p.text_feature, origin)
        if not isinstance(text, bytes):
            raise BadRecordError(origin, f"{p.text_feature!r} is not one byte string")
        try:
            transcript = to_text(text)
        except NotTextError as error:
            raise BadRecordError(origin, f"{p.text_feature!r}: {error}") from error
        return self._formed(Utterance(self._audio(audio, origin), transcript), origin)

    def _audio(self, value: Any, origin: Origin) -> Any:
        p = self.params
        if isinstance(value, list):
            raise BadRecordError(origin, f"{p.feature!r} is not one byte string")
        if isinstance(value, bytes) and p.encoding == "file":
            return value
        if not p.sample_rate:
            raise InputError(
                f"{origin}: {p.feature!r} has samples: set {p.path_of('sample_rate')} to the "
                "number per second"
            )
        if isinstance(value, bytes):
            if len(value) % 2:
                raise BadRecordError(
                    origin, f"{p.feature!r} has {len(value)} bytes, which are no 16-bit samples"
                )
            return np.frombuffer(value, "<i2").astype(np.int16), p.sample_rate
        if value.dtype == np.int64:
            narrow = value.astype(np.int16)
            if not np.array_equal(narrow, value):
                raise BadRecordError(origin, f"{p.feature!r} has numbers that are not 16-bit")
            value = narrow
        return value, p.sample_rate
