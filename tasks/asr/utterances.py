"""Utterances, and the base of all sources of speech."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.sources import Source, digest
from tekso.framework.params import param
from tekso.tasks.asr.audio import AudioError, Samples, decode_audio, mono, read_audio, seconds_of
from tekso.tasks.asr.transcripts import TextForm, as_form


class Utterance(NamedTuple):
    """A recording and what is said in it.

    Attributes:
      audio: path of an audio file, its bytes, or (samples, sample rate): int16, or floats in
        [-1, 1), [samples] or [samples, channels].
      text: the transcript.
    """

    audio: Any
    text: str


class AnySpeech(Source):
    """Base of all sources of speech, whose records are `Utterance`s.

    A subclass defines the methods of `Source`; those that know all utterances at the start are
    subclasses of `SpeechSource`, which needs only `load`.
    """

    class Params(Source.Params):
        """Params of AnySpeech."""

        text_form: TextForm = param(
            "spoken: lower case, no punctuation, digits as words. raw: as written.",
            default="spoken",
        )

    def fingerprint_parts(self) -> Iterator[bytes]:
        """Yields what the fingerprint is a digest of."""
        yield self.fingerprint().encode()

    def content_digest(self) -> str:
        """Returns a digest that also changes if the recordings change, for caches."""
        return digest([self.fingerprint().encode(), self.params.text_form.encode()])

    def audio_file(self, index: int) -> str | None:
        """Returns the audio file of an utterance; None if its recording is not in its own file."""
        del index
        return None

    def seconds(self, index: int) -> float:
        """Returns the length of an utterance; of a file, according to its header.

        Raises:
          BadRecordError: the file is missing or is not audio.
        """
        return self.seconds_of(self._utterance(index), self.origin(index))

    def samples(self, index: int, sample_rate: int) -> Samples:
        """Returns the samples of an utterance, [samples].

        Raises:
          BadRecordError: the file is missing, damaged or empty.
        """
        return self.samples_of(self._utterance(index), self.origin(index), sample_rate)

    @staticmethod
    def seconds_of(utterance: Utterance, origin: Origin) -> float:
        """Returns the length of an utterance; see `seconds`."""
        audio = utterance.audio
        if isinstance(audio, tuple):
            return float(len(audio[0]) / audio[1])
        try:
            return seconds_of(audio)
        except (AudioError, OSError) as error:
            raise _bad(audio, origin, error) from error

    @staticmethod
    def samples_of(utterance: Utterance, origin: Origin, sample_rate: int) -> Samples:
        """Returns the samples of an utterance; see `samples`."""
        audio = utterance.audio
        try:
            if isinstance(audio, str):
                return read_audio(audio, sample_rate)
            if isinstance(audio, bytes):
                return decode_audio(audio, sample_rate)
            return mono(audio[0], audio[1], sample_rate)
        except (AudioError, OSError) as error:
            raise _bad(audio, origin, error) from error

    def _utterance(self, index: int) -> Utterance:
        """Returns an utterance; its text may be in any form."""
        found: Utterance = self[index]
        return found

    def _formed(self, utterance: Utterance, origin: Origin) -> Utterance:
        """Returns an utterance with its text in the form of the Params.

        Raises:
          BadRecordError: the text has no words.
        """
        text = as_form(utterance.text, self.params.text_form)
        if not text:
            raise BadRecordError(origin, f"no words in the transcript {utterance.text!r}")
        return Utterance(utterance.audio, text)


def _bad(audio: Any, origin: Origin, error: Exception) -> BadRecordError:
    return BadRecordError(Origin(audio) if isinstance(audio, str) else origin, reason_of(error))


def int16_samples(samples: Samples) -> npt.NDArray[np.int16]:
    """Returns samples in [-1, 1) as 16-bit integers.

    Shapes:
      samples, returns: any, the same
    """
    whole = np.clip(np.rint(samples * 32_768), -32_768, 32_767)
    return np.asarray(whole, np.int16)
